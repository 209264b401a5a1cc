"""The bytes that tensors hold at once, on any device: what ``torch.cuda.max_memory_allocated`` tells on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts what is allocated by operations inside its block; ``peak`` is the most that was held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.known:
                    self._add(key, storage)
        return found

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.held -= size
