"""A region that is a norm of rows of torch.nn, a residual before it or none, where all is as it mostly is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap.ops.dispatch import PLAIN, any_autocast, direct
from normswap.ops.rms_norm import FLOAT32_EPS
from normswap.regions.children import Norm, OriginalClass
from normswap.regions.rewrite import Compiled

_KINDS: Mapping[str, type[nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
_Dtype = Callable[[Mapping[str, Any], Tensor], torch.dtype | None]


def rows_of(compiled: Compiled, original_class: OriginalClass, dtype: _Dtype) -> Rows | None:
    """The region's, or None for a region of another kind. ``dtype``: that of the result where nobody sees it before
    autocast has cast it to that."""
    region, cls = compiled.region, _KINDS.get(compiled.region.kind)
    named = cls is not None and region.type == f"{cls.__module__}.{cls.__qualname__}"
    others = region.attributes or region.passes or compiled.callees() or region.activation
    if cls is None or not named or others or any(step.does not in ("sum", "norm") for step in region.steps):
        return None
    return Rows(compiled, cls, original_class, dtype)


class Rows:
    """One look at each thing that may have changed, then the native op that does all. None else; what is to be done
    then, ``Fused`` finds out."""

    def __init__(self, compiled: Compiled, cls: type[nn.Module], original_class: OriginalClass, dtype: _Dtype) -> None:
        region = compiled.region
        affine = {"weight", "bias"} if cls is nn.LayerNorm else {"weight"}
        self.norm = Norm(region.norm, cls, affine, original_class)
        self.at = region.step("sum").operand if region.has("sum") else -1
        self.run = self._layer_norm if cls is nn.LayerNorm else self._rms_norm
        self.shared, self.dtype = region.shared, dtype if region.feeds else None

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        own = self.norm.attributes(children)
        if own is None:
            return None
        x, before = packed, None
        if self.at >= 0:
            x, before = packed[self.at], packed[1 - self.at]
            if type(x) not in PLAIN or type(before) not in PLAIN:
                return None
            if before.dtype is not x.dtype:  # the sum has the wider one
                x, before = x + before, None
        elif type(x) not in PLAIN:
            return None
        out, total = self.run(children, own, x, before)
        if out is None:
            return None
        return (x if total is None else total, out) if self.shared else out

    def _layer_norm(
        self, children: Mapping[str, Any], own: Mapping[str, Any], x: Tensor, before: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(output, sum where there is a residual), or None twice."""
        weight, bias, shape = _affine(own)
        lowered, wide = None, False
        if any_autocast() and torch.is_autocast_enabled("cuda"):
            lowered = None if self.dtype is None else self.dtype(children, x)
            wide = x.dtype is not torch.float32 and lowered is None
            if lowered is not None and x.dtype not in (lowered, torch.float32):
                return None, None
        if (x.shape[-len(shape) :] if weight is None else weight.shape) != shape:
            return None, None
        if before is None and not wide:
            op: Any = direct("layer_norm", x, weight, bias, autocast=True)
            out, total = None if op is None else op(x, len(shape), weight, bias, own["eps"]), None
        else:
            op = direct("layer_norm_with_options", x, before, weight, bias, autocast=True)
            if op is None:
                return None, None
            out, total = op(x, len(shape), weight, bias, own["eps"], before, None, None, 0, 0.0, 0.0, wide)
        if out is not None and lowered is not None:
            out = out.to(lowered)
        return out, total

    def _rms_norm(
        self, children: Mapping[str, Any], own: Mapping[str, Any], x: Tensor, before: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """As ``_layer_norm``; under autocast, which widens it in some versions alone, not here."""
        weight, _, shape = _affine(own)
        eps = FLOAT32_EPS if own["eps"] is None else own["eps"]
        if (x.shape[-len(shape) :] if weight is None else weight.shape) != shape:
            return None, None
        if before is None:
            op: Any = direct("rms_norm", x, weight)
            return None if op is None else op(x, len(shape), weight, eps, 0.0, False), None
        op = direct("rms_norm_with_options", x, before, weight)
        if op is None:
            return None, None
        found: tuple[Tensor | None, Tensor | None] = op(
            x, len(shape), weight, eps, 0.0, False, before, None, None, 0, 0.0, 0.0
        )
        return found


def _affine(own: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Weight, bias and normalized_shape, from the attributes of a norm."""
    parameters = own["_parameters"]
    return parameters["weight"], parameters.get("bias"), own["normalized_shape"]
