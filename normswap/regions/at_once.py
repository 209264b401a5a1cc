"""A region as one step of C++: a norm of torch.nn or a call of its function, and what stands before and behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap.forwards.batch_norm import RANKS
from normswap.forwards.replaced import Replaced
from normswap.installed import original_class
from normswap.ops.at_once import NAMES, AtOnce, Norm
from normswap.regions.activations import activation_of
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import children_of, qualified

_KINDS: Mapping[str, tuple[type[nn.Module], set[str]]] = {
    "layer_norm": (nn.LayerNorm, {"sum", "gain", "shift"}),
    "rms_norm": (nn.RMSNorm, {"sum", "gain", "shift"}),
    "group_norm": (nn.GroupNorm, {"residual"}),
    "batch_norm": (nn.modules.batchnorm._BatchNorm, {"residual"}),
}
"""The class, and the steps that the native op has besides the norm."""
_RANKS = {qualified(cls): ranks for cls, ranks in RANKS.items()}
_FORWARDS = {cls: Replaced(cls) for cls in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *RANKS)}
_Dtype = Callable[[Mapping[str, Any], Tensor], torch.dtype | None]


def at_once_of(compiled: Compiled, dtype: _Dtype) -> AtOnce:
    """What calls the region so, if anything does. ``dtype``: that of the result where nobody sees it before autocast
    has cast it to that."""
    region = compiled.region
    cls, steps = _KINDS.get(region.kind, (nn.Module, set[str]()))
    does = {step.does for step in region.steps}
    if region.kind not in _KINDS or {*region.attributes} - {"unless"} or does - steps - {"norm", "pass", "activation"}:
        return AtOnce(None)
    names = NAMES[region.kind]
    if region.kind == "batch_norm":
        if region.type not in _RANKS:
            return AtOnce(None)
        names = (_RANKS[region.type],), *names

    def stands(module: Any) -> Any:
        of: Any = original_class(module)
        plain = issubclass(of, cls) and of.__getattribute__ is object.__getattribute__
        return (_FORWARDS.get(of) or Replaced(of)).known if plain and qualified(of) == region.type else None

    literal = region.literal_activation()
    packs = bool(does & {"residual", "gain", "shift"}) or not region.type
    numbers = None if literal is None else (literal.code, literal.low, literal.high)
    return AtOnce(
        Norm(
            *(region.kind, stands, region.attributes.get("unless"), names),
            child=region.norm if region.type else None,
            children=children_of(region),
            unpack=compiled.unpack if packs else None,
            position=region.step("sum").operand if "sum" in does else -1,
            lowered=dtype if region.feeds else None,
            passes=region.passes,
            acting=None if numbers else str(region.activation),
            activation_of=_numbers_of,
            activation=numbers or (0, 0.0, 0.0),
            callees=compiled.callees,
            called=compiled.callees(),
            region=True,
            shared=region.shared,
            needs_behind="residual" in does,
            needs_scale="gain" in does,
        )
    )


def _numbers_of(child: Any) -> tuple[int, float, float] | None:
    activation = activation_of(child)
    return None if activation is None else (activation.code, activation.low, activation.high)
