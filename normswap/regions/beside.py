"""Children that a forward calls between the operations of a region, which then run before all of them: whether they
still only compute, asked on every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from normswap.forwards.plain import is_unhooked
from normswap.regions.spec import Region, qualified


class Beside:
    """The children beside ``regions``. ``original_class`` gives the class a module had before it was swapped."""

    def __init__(self, regions: Iterable[Region], original_class: Callable[[nn.Module], Any]) -> None:
        found = [pair for region in regions for pair in region.beside.items()]
        self.names = tuple(dict.fromkeys(name for name, _ in found))
        self.classes = frozenset(cls for _, classes in found for cls in classes)
        self.original_class = original_class
        self.known: set[type] = set()

    def only_compute(self, owner: Any) -> bool:
        """Whether every one is of the classes that were read, runs nothing of anybody else's, and so do those in it."""
        if torch.compiler.is_compiling():  # which looks at no class; the statements are fused there anyway
            return False
        children = owner._modules
        return all(self._only_computes(children.get(name)) for name in self.names)

    def _only_computes(self, module: Any) -> bool:
        cls = type(module)
        if cls not in self.known:
            if not isinstance(module, nn.Module) or qualified(self.original_class(module) or cls) not in self.classes:
                return False
            self.known.add(cls)
        return is_unhooked(module) and all(map(self._only_computes, module._modules.values()))
