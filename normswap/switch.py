"""Blocks in which a model runs its original code, in any number of threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from normswap.installed import class_before, site_match
from normswap.untouched import set_classes, surely


class _Off:
    """How many blocks a module is in, and its class outside and inside of them."""

    def __init__(self, ours: type[nn.Module], original: type[nn.Module]) -> None:
        self.blocks, self.ours, self.original = 0, ours, original


_off: Any = WeakIdKeyDictionary()
_lock = threading.RLock()


@contextmanager
def originals(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Give every swapped module of ``model`` its original class until the last such block about it ends.

    The list that the block gets holds, after it, the modules whose class was changed within: they keep that class.
    """
    entered: list[tuple[nn.Module, _Off]] = []
    changed: list[nn.Module] = []
    found = [(module, _state_of(module)) for module in model.modules()]
    try:
        with _lock:
            for module, state in found:
                if state is not None:
                    entered.append((module, state))
                    _off[module] = state
                    state.blocks += 1
            set_classes((module, state.original) for module, state in entered if state.blocks == 1)
        yield changed
    finally:
        surely(partial(_leave, entered, changed))


def _state_of(module: nn.Module) -> _Off | None:
    """What is known of a module that is in a block already, or what it is to be; None where nothing was swapped."""
    state: _Off | None = _off.get(module)
    if state is not None and type(module) is state.original:
        return state
    return None if site_match(module) is None else _Off(type(module), class_before(module))


def _leave(entered: list[tuple[nn.Module, _Off]], changed: list[nn.Module]) -> None:
    with _lock:
        last = [(module, state) for module, state in entered if state.blocks == 1 and _off.get(module) is state]
        set_classes((m, state.ours) for m, state in last if type(m) is state.original)
        while entered:
            module, state = entered.pop()
            state.blocks -= 1
            if state.blocks == 0 and _off.get(module) is state:
                del _off[module]
                if type(module) is not state.ours:
                    changed.append(module)


def forget(modules: Iterable[nn.Module]) -> None:
    """Let blocks about these ``modules`` end without giving them their swapped class back."""
    with _lock:
        for module in modules:
            _off.pop(module, None)
