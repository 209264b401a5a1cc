"""The children that a region calls, or that a forward calls between its operations, which then run before all of them:
whether calling them does what it did when it was found, asked on every call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from normswap.attributes import own_getattr
from normswap.forwards.plain import DROPOUTS, is_bare, is_plain
from normswap.installed import called_class
from normswap.ops import at_once
from normswap.ops.at_once import PASSING
from normswap.regions.spec import Region, children_of, qualified


def child_at(children: Mapping[str, Any], path: str) -> Any:
    """The child ``path`` of a module with these ``children``, or of one of these ("bn1.act"); None where none is."""
    name, _, inner = path.partition(".")
    child = children.get(name)
    if not inner or child is None:
        return child
    return None if inner in child.__dict__ else child._modules.get(inner)


def hands_on(child: Any) -> bool:
    """True when calling ``child`` gives back what it is given: an nn.Identity, or a dropout that is off."""
    if type(child) is nn.Identity:
        return is_plain(child, nn.Identity)
    cls = type(child)
    return cls in DROPOUTS and is_plain(child, cls) and (not child.training or child.p == 0)


PASSING.update({cls: cls is not nn.Identity for cls in (nn.Identity, *DROPOUTS)})


class Reached:
    """The children that ``regions`` call, or that are called beside them, by ``self.name``: an attribute of a class
    that somebody puts there hides them. Classes are looked at anew where they hold more, or less, than they did."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.names = frozenset(name for one in regions for name in (*children_of(one), *one.feeds, *one.beside))
        self.known: dict[type, list[tuple[Mapping[str, Any], int]]] = {}

    def are_children(self, owner: Any) -> bool:
        """Whether reading ``owner.name`` gives what is registered, if the instance does not hide it."""
        if torch.compiler.is_compiling():  # the statements run, which read what there is
            return True
        known = self.known.get(type(owner))
        if known is None:
            return self._asked(owner)
        for attributes, count in known:
            if len(attributes) != count:
                return self._asked(owner)
        return True

    def _asked(self, owner: Any) -> bool:
        cls = type(owner)
        self.known.pop(cls, None)
        if own_getattr(owner) is not None or any(getattr_static(cls, name, None) is not None for name in self.names):
            return False
        theirs = (one for one in cls.__mro__ if not str(one.__module__).startswith(_LEFT))
        self.known[cls] = [(vars(one), len(vars(one))) for one in theirs]
        return True


_LEFT = ("torch.nn.modules.", "builtins", "normswap.")
"""Whose classes nobody gives a child's name to."""


class Beside:
    """The children beside ``regions``."""

    def __init__(self, regions: Iterable[Region]) -> None:
        found = [pair for region in regions for pair in region.beside.items()]
        self.names = tuple(dict.fromkeys(name for name, _ in found))
        self.classes = frozenset(cls for _, classes in found for cls in classes)
        self.known: set[type] = set()

    def only_compute(self, owner: Any) -> bool:
        """Whether every one is of the classes that were read, runs nothing of anybody else's, and so do those in it."""
        if torch.compiler.is_compiling() or _has_any_global_hook():  # compiled, the statements are fused anyway
            return False
        own = owner.__dict__
        for name in self.names:
            if name in own:  # it hides the child
                return False
        if (walk := at_once.only_compute) is not None:
            return walk(owner._modules, self.names, self.known, self._is_known)  # type: ignore[no-any-return]
        children, known = owner._modules, self.known
        waiting = [children.get(name) for name in self.names]
        for module in waiting:  # which grows
            if type(module) not in known and not self._is_known(module):
                return False
            own = module.__dict__
            if not is_bare(own):
                return False
            if own["_modules"]:
                waiting += own["_modules"].values()
        return True

    def _is_known(self, module: Any) -> bool:
        """Whether it is of one of the classes that were read, then kept for others of its class."""
        cls = called_class(module) if isinstance(module, nn.Module) else None
        if cls is None or qualified(cls) not in self.classes:
            return False
        self.known.add(type(module))
        return True
