"""A region that is a GroupNorm of torch.nn, or a call of its function, with a residual and an activation behind it or
neither, where all is as it mostly is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from normswap.kinds.operands import is_alike
from normswap.ops.dispatch import direct
from normswap.regions.activations import activation_of
from normswap.regions.children import Norm, OriginalClass, hands_on
from normswap.regions.rewrite import Compiled

_CLASS = f"{nn.GroupNorm.__module__}.{nn.GroupNorm.__qualname__}"
_STEPS = {"norm", "pass", "residual", "activation"}


def groups_of(compiled: Compiled, original_class: OriginalClass) -> Groups | None:
    """The region's, or None for a region of another kind."""
    region = compiled.region
    fits = region.kind == "group_norm" and region.type in ("", _CLASS) and not region.attributes
    known = {step.does for step in region.steps} <= _STEPS and not region.feeds
    return Groups(compiled, original_class) if fits and known else None


class Groups:
    """One look at each thing that may have changed, then the native op that does all. None else; what is to be done
    then, ``Fused`` finds out."""

    def __init__(self, compiled: Compiled, original_class: OriginalClass) -> None:
        region = compiled.region
        self.unpack, self.passes, self.behind = compiled.unpack, region.passes, region.has("residual")
        self.norm = Norm(region.norm, nn.GroupNorm, {"weight", "bias"}, original_class) if region.type else None
        self.callees, self.called = compiled.callees, compiled.callees()
        self.activation = region.literal_activation()
        self.acting = region.activation if isinstance(region.activation, str) else ""

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        x, _, behind, _, _, given = self.unpack(packed)
        if self.norm is not None:
            own = self.norm.attributes(children)
            if own is None:
                return None
            parameters = own["_parameters"]
            given = own["num_groups"], parameters["weight"], parameters["bias"], own["eps"]
        if self.called and self.callees() != self.called:  # somebody put another function in the place of one
            return None
        for name in self.passes:
            if not hands_on(children.get(name)):
                return None
        activation = self.activation or activation_of(children.get(self.acting))
        if activation is None:
            return None
        groups, weight, bias, eps = given
        op = direct("group_norm", x, weight, bias, behind)
        if op is None or (self.behind and (behind is None or not is_alike(x, behind))):
            return None
        return op(x, groups, weight, bias, eps, activation.code, activation.low, activation.high, behind, False)
