"""Norms that a person has declared to be one of torch.nn's in another guise; the proof has the last word on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from normswap.kinds import NORMS
from normswap.plans import READ, Match, Reason, Refusal
from normswap.rules.expression_site import not_rewritable
from normswap.rules.module_site import is_lazy

_Class = TypeVar("_Class", bound=type[nn.Module])

_READ = {norm.name: (norm.classes[0], norm.reads) for norm in NORMS.values() if norm.reads}
_registered: dict[type[nn.Module], Match] = {}


def register_norm(like: str | type[nn.Module], **reads: str | float) -> Callable[[_Class], _Class]:
    """Declare that a module class computes what ``like`` does: "layer_norm", "group_norm" or "rms_norm", or their
    class in torch.nn. Used as a decorator, or called with the class: ``register_norm("rms_norm")(TheirNorm)``.

    ``reads`` says where its values are, under the names that torch.nn uses, where they differ from these: the name of
    an attribute, read on every call, or a number: ``register_norm("rms_norm", weight="gamma", eps=1e-6)``. A missing
    weight or bias is none; normalized_shape and num_channels may also be taken from the weight.

    Instances of exactly this class are from then on sites, proved like any other, and put back where the declaration
    is wrong. Raises ValueError for another kind or name, TypeError for what is no nn.Module class.
    """
    kind = next((k for k, (cls, _) in _READ.items() if like in (k, cls)), None)
    if kind is None:
        raise ValueError(f"register_norm: like must be one of {', '.join(map(repr, _READ))}, got {like!r}")
    names = _READ[kind][1]
    if wrong := sorted(reads.keys() - set(names)):
        raise ValueError(f"register_norm: a {kind} reads {', '.join(names)}; got {', '.join(wrong)}")
    if wrong := sorted(name for name, given in reads.items() if type(given) not in (str, int, float)):
        raise TypeError(f"register_norm: {wrong[0]} must be the name of an attribute or a number")
    match = Match(kind, {READ + name: reads.get(name, name) for name in names})

    def register(cls: _Class) -> _Class:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"register_norm: expected a class of modules, got {cls!r}")
        _registered[cls] = match
        return cls

    return register


def match(module: nn.Module) -> Match | Refusal | None:
    """The match declared for exactly the class of ``module``; refused where its values cannot be read."""
    declared = _registered.get(type(module))
    if declared is None:
        return None
    if is_lazy(module):
        return Refusal(declared.kind, Reason.LAZY)
    return not_rewritable(module, declared.kind) or _unread(declared, module) or declared


def _unread(declared: Match, module: nn.Module) -> Refusal | None:
    found: Any = declared.view(module)
    for name in _READ[declared.kind][1]:
        if name not in ("weight", "bias") and getattr(found, name) is None:
            detail = (
                f"{type(module).__name__} is registered, and has no {name}: give register_norm its {name}, the name of "
                "an attribute or a number"
            )
            return Refusal(declared.kind, Reason.UNSUPPORTED, detail)
    return None
