"""The swapped modules: torch.nn classes whose forward calls our ops, and subclasses made for expression sites.

A module is swapped by giving it one of these classes; parameters, buffers, hooks, children and keys stay as they are.
"""

from __future__ import annotations

import copyreg
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from normswap.forwards.placed import in_the_place_of
from normswap.forwards.replaced import Replaced
from normswap.installed import covered_class, marks, original_class, remember, site_match, unannounced
from normswap.kinds import NORMS, Norm, kind_of
from normswap.norms import GroupNorm as GroupNorm
from normswap.norms import InstanceNorm1d as InstanceNorm1d
from normswap.norms import InstanceNorm2d as InstanceNorm2d
from normswap.norms import InstanceNorm3d as InstanceNorm3d
from normswap.norms import L1Norm as L1Norm
from normswap.norms import LayerNorm as LayerNorm
from normswap.norms import LinearScaleBatchNorm as LinearScaleBatchNorm
from normswap.norms import RMSNorm as RMSNorm
from normswap.norms import copy_weights as copy_weights
from normswap.ops.at_once import Guarded
from normswap.plans import REGION, Match, PlanError
from normswap.regions import install as regions

_Maker = Callable[[Replaced, Mapping[str, Any]], Callable[..., Tensor] | Guarded]

_MODULE_CLASSES: dict[type[nn.Module], tuple[str, type[nn.Module]]] = {
    original: (norm.name, swapped)
    for norm in NORMS.values()
    for original, swapped in zip(norm.classes, norm.swapped, strict=False)
}


class Rewritten:
    """Mixin of the classes made for expression sites: what they replace, and that nobody is told of them."""

    _normswap_original: ClassVar[type[nn.Module]]
    _normswap_match: ClassVar[Match]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_normswap_match" not in vars(cls):
            super().__init_subclass__(**kwargs)


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy a swapped module by the original class and the match: its class bears the original's name.
    Where the original says itself what makes one, that makes it, and what is made is not swapped."""
    match = site_match(self)
    exact = match is not None and covered_class(self) in (None, type(self))
    original: Any = original_class(self) if exact else nn.Module
    reduced = original.__reduce_ex__(self, protocol)
    if not exact or not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        return (_rebuild, (original, match.kind, dict(match.attributes)), *rest)  # type: ignore[union-attr]
    make, *arguments = (original if one is type(self) else one for one in (make, *arguments))
    return (make, tuple(arguments), *rest)


for _original, (_kind, _swapped) in _MODULE_CLASSES.items():
    for _name, _mark in marks(_original, Match(_kind)).items():
        setattr(_swapped, _name, _mark)
    _swapped.__module__ = _original.__module__  # torch.fx takes for a leaf what torch.nn has made
    _swapped.__reduce_ex__ = _reduced  # type: ignore[assignment]
Rewritten.__reduce_ex__ = _reduced  # type: ignore[assignment]


def _rebuild(original: type[nn.Module], kind: str, attributes: Mapping[str, Any]) -> nn.Module:
    cls = swapped_class(kind, original, attributes)
    module: nn.Module = object.__new__(cls)
    remember(module, cls)
    return module


def swapped_class(kind: str, original: type[nn.Module], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """The class to install at a site of ``kind`` whose module has the class ``original``.

    For torch.nn's own norms that is the importable class; for their subclasses and for expression kinds a subclass of
    ``original``, made once per (original, its forward, attributes), that has its name. Raises PlanError when they do
    not fit.
    """
    known, swapped = _MODULE_CLASSES.get(original, ("", nn.Module))
    if known == kind and not attributes:
        return swapped
    make = _maker(Match(kind, attributes), original)
    if make is None:
        raise PlanError(f"{kind}: no swap of this kind for a {original.__name__}")
    text = json.dumps(dict(attributes), sort_keys=True)
    replaced = Replaced(original, regions.method_of(attributes), whole=kind != REGION)
    # What is made holds on to the forward and its code: while it lives, nothing else has their ids.
    key = (kind, text, id(replaced.function), id(replaced.code))
    made = _made.setdefault(original, WeakValueDictionary())
    cls: type[nn.Module] | None = made.get(key)
    if cls is None:
        cls = made[key] = _rewritten_class(Match(kind, json.loads(text)), replaced, make)
    return cls


# By the original, and by all that a class is made of.
_made: Any = WeakIdKeyDictionary()


def _rewritten_class(match: Match, replaced: Replaced, make: _Maker) -> type[nn.Module]:
    original: type[nn.Module] = replaced.original
    body = {
        replaced.name: in_the_place_of(replaced, make(replaced, match.attributes)),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        **marks(original, match),
    }
    made: type[nn.Module] = unannounced(type(original), original.__name__, (Rewritten, original), body)
    replaced.installed = made
    return made


def _maker(match: Match, original: type[nn.Module]) -> _Maker | None:
    """What makes the forward of the class to install for ``original``; None where they do not fit."""
    if match.kind == REGION:
        return regions.make_forward
    kind = kind_of(match)
    fits = match.registered or not isinstance(kind, Norm) or issubclass(original, kind.classes)
    return kind.forward if fits else None
