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

from normswap import install_table
from normswap.forwards.placed import in_the_place_of
from normswap.forwards.registered import registered_forward
from normswap.forwards.replaced import Replaced
from normswap.kinds import NORMS, Norm, kind_of
from normswap.norms import (
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    L1Norm,
    LayerNorm,
    LinearScaleBatchNorm,
    RMSNorm,
    copy_weights,
)
from normswap.plan import REGION, Match, NormswapError, PlanError
from normswap.regions import install as regions
from normswap.regions.chain import in_rows
from normswap.regions.helper import make_helper

__all__ = [
    "INSTALLED",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "L1Norm",
    "LayerNorm",
    "LinearScaleBatchNorm",
    "RMSNorm",
    "Rewritten",
    "class_before",
    "copy_weights",
    "installed_class",
    "original_class",
    "site_match",
    "swapped_class",
]

_Forward = Callable[..., Tensor]

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


INSTALLED: tuple[type, ...] = (*(swapped for _, swapped in _MODULE_CLASSES.values()), Rewritten)
"""Every class that swapping installs is one of these or a subclass."""


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy a swapped module by the original class and the match: its class bears the original's name."""
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)
    match, original = site_match(self), original_class(self)
    exact = match is not None and original is not None and install_table.covered_class(self) in (None, type(self))
    if not exact or not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return (_rebuild, (original, match.kind, dict(match.attributes)), *reduced[2:])  # type: ignore[union-attr]


for _original, (_, _swapped) in _MODULE_CLASSES.items():
    _swapped.__module__ = _original.__module__  # torch.fx takes for a leaf what torch.nn has made
    _swapped.__reduce_ex__ = _reduced  # type: ignore[assignment]
Rewritten.__reduce_ex__ = _reduced  # type: ignore[assignment]


def _rebuild(original: type[nn.Module], kind: str, attributes: Mapping[str, Any]) -> nn.Module:
    cls = swapped_class(kind, original, attributes)
    module: nn.Module = object.__new__(cls)
    install_table.remember(module, cls)
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
    if _maker(Match(kind, attributes), original) is None:
        raise PlanError(f"{kind}: no swap of this kind for a {original.__name__}")
    text = json.dumps(dict(attributes), sort_keys=True)
    replaced = Replaced(original, regions.method_of(attributes))
    # What is made holds on to the forward and its code: while it lives, nothing else has their ids.
    key = (kind, text, id(replaced.function), id(replaced.code))
    made = _made.setdefault(original, WeakValueDictionary())
    cls: type[nn.Module] | None = made.get(key)
    if cls is None:
        cls = made[key] = _rewritten_class(Match(kind, json.loads(text)), replaced)
    return cls


# By the original, and by all that a class is made of.
_made: Any = WeakIdKeyDictionary()


def _rewritten_class(match: Match, replaced: Replaced) -> type[nn.Module]:
    original: type[nn.Module] = replaced.original
    make = _maker(match, original)
    assert make is not None
    body = {
        replaced.name: in_the_place_of(replaced, make(replaced, match.attributes)),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_normswap_original": original,
        "_normswap_match": match,
    }
    made: type[nn.Module] = install_table.unannounced(type(original), original.__name__, (Rewritten, original), body)
    replaced.installed = made
    return made


def _maker(match: Match, original: type[nn.Module]) -> Callable[[Replaced, Mapping[str, Any]], _Forward] | None:
    """What makes the forward of the class to install for ``original``; None where they do not fit."""
    if match.kind == REGION:
        return _region_forward
    kind = kind_of(match)
    if match.registered and isinstance(kind, Norm):
        return registered_forward(match.kind)
    return kind.forward if not isinstance(kind, Norm) or issubclass(original, kind.classes) else None


def _region_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
    return regions.with_helpers(
        replaced,
        attributes,
        lambda compiled: make_helper(compiled, original_class),
        original_class,
        lambda compiled, helpers: in_rows(compiled, helpers, original_class),
    )


def installed_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that swapping installed at ``module``, its own or one that another tool has put its own over since;
    None where there is none."""
    cls = type(module)
    if "_normswap_match" in vars(cls) or any(cls is swapped for _, swapped in _MODULE_CLASSES.values()):
        return cls
    return install_table.covered_class(module)


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that was replaced at ``module``; None when none was, or it was put back."""
    cls = installed_class(module)
    if cls is None or "_normswap_match" in vars(cls):
        return None if cls is None else cls._normswap_original  # type: ignore[attr-defined,no-any-return]
    return next((original for original, (_, swapped) in _MODULE_CLASSES.items() if cls is swapped), None)


def class_before(module: nn.Module) -> type[nn.Module] | None:
    """The class that puts ``module`` back: the one that was replaced, under what another tool has put over ours since;
    None when it is not swapped. Raises NormswapError where that tool's class cannot be put over another."""
    installed, original = installed_class(module), original_class(module)
    if installed is None or original is None:
        return None
    try:
        return install_table.rebased(type(module), installed, original)
    except install_table.Covered as error:
        raise NormswapError(
            f"a {type(module).__qualname__} was put over the class that was installed, and cannot be put over another "
            f"({error}); undo that first"
        ) from error


def site_match(module: nn.Module) -> Match | None:
    """What was swapped at ``module``: its kind and attributes; None when it is not swapped."""
    cls = installed_class(module)
    if cls is None or "_normswap_match" in vars(cls):
        return None if cls is None else cls._normswap_match  # type: ignore[attr-defined,no-any-return]
    return next((Match(kind) for kind, swapped in _MODULE_CLASSES.values() if cls is swapped), None)
