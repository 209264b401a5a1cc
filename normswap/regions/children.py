"""The children that a region calls, or that a forward calls between its operations, which then run before all of them:
whether calling them does what it did when it was found, asked on every call."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from normswap.forwards.plain import DROPOUTS, is_bare, is_plain
from normswap.installed import called_class, how_called, is_called_as
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
    """The children that ``regions`` call, or that are called beside them, by ``self.name``: what somebody puts there,
    on the instance or on a class, hides them."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.names = frozenset(name for one in regions for name in (*children_of(one), *one.feeds, *one.beside))
        self.hiding = self.names | {"__getattr__", "__getattribute__"}
        self.known: dict[type, tuple[KeysView[str], ...]] = {}

    def are_children(self, owner: Any) -> bool:
        """Whether reading ``owner.name`` gives what is registered."""
        held = self.known.get(type(owner))
        if held is None:
            classes = (one for one in type(owner).__mro__ if one is not object and one is not nn.Module)
            held = self.known[type(owner)] = tuple(vars(one).keys() for one in classes)
        for attributes in held:
            if not attributes.isdisjoint(self.hiding):
                return False
        return self.names.isdisjoint(owner.__dict__)


_MOST = 10_000
"""Of modules; one may hold itself."""


class Beside:
    """The children beside ``regions``."""

    def __init__(self, regions: Iterable[Region]) -> None:
        found = [pair for region in regions for pair in region.beside.items()]
        self.names = tuple(dict.fromkeys(name for name, _ in found))
        self.classes = frozenset(cls for _, classes in found for cls in classes)
        self.known: dict[type, tuple[Any, Any]] = {}

    def only_compute(self, owner: Any) -> bool:
        """Whether every one is of the classes that were read, runs nothing of anybody else's, and so do those in it;
        if reading ``owner.name`` gives what is registered."""
        if _has_any_global_hook():
            return False
        if (walk := at_once.only_compute) is not None:
            return walk(owner._modules, self.names, self.known, self.is_known)  # type: ignore[no-any-return]
        children, known = owner._modules, self.known
        waiting = [children.get(name) for name in self.names]
        for module in waiting:  # which grows
            if len(waiting) > _MOST:
                return False
            if not is_called_as(known.get(type(module)), type(module)) and not self.is_known(module):
                return False
            own = module.__dict__
            if not is_bare(own):
                return False
            if own["_modules"]:
                waiting += own["_modules"].values()
        return True

    def is_known(self, module: Any) -> bool:
        """Whether it is of one of the classes that were read, then kept for others of its class."""
        original = called_class(module) if isinstance(module, nn.Module) else None
        if original is None or qualified(original) not in self.classes or type(module) in self.known:
            return False
        self.known[type(module)] = how_called(type(module))
        return True
