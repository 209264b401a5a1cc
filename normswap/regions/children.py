"""The children that a region calls: whether calling them does what it did when it was found, asked on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from normswap.forwards.plain import is_bare, is_plain
from normswap.forwards.replaced import Replaced

OriginalClass: TypeAlias = "Callable[[nn.Module], type[nn.Module] | None]"
"""The class a module had before it was swapped, None for one that was not."""


class Norm:
    """The child ``name``, a norm of the class ``cls`` of torch.nn, or one that was swapped."""

    def __init__(self, name: str, cls: type[nn.Module], affine: set[str], original_class: OriginalClass) -> None:
        self.name, self.cls, self.affine = name, cls, affine
        self.replaced, self.original_class = _FORWARDS.get(cls) or Replaced(cls), original_class
        self.known = dict[type, bool]()

    def attributes(self, children: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Its ``__dict__``, its parameters among it; None where calling it may do something else by now."""
        norm = children.get(self.name)
        cls = type(norm)
        if cls is not self.cls and not self._stands_for(norm, cls):
            return None
        own: Mapping[str, Any] = norm.__dict__
        if not self.affine <= own["_parameters"].keys():  # a tool holds them elsewhere
            return None
        return own if is_bare(own) and not _has_any_global_hook() and self.replaced.is_unchanged() else None

    def _stands_for(self, norm: Any, cls: type) -> bool:
        """Whether ``norm``, of another class than when the region was found, is one that was swapped."""
        if cls not in self.known:
            self.known[cls] = norm is not None and self.original_class(norm) is self.cls
        return self.known[cls]


_FORWARDS: dict[type[nn.Module], Replaced] = {cls: Replaced(cls) for cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)}
"""As they were when this was imported: a region may first be run when somebody has put another forward on the class."""


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
    return cls in _DROPOUTS and is_plain(child, cls) and (not child.training or child.p == 0)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
