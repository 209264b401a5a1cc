"""A region of a Linear and a BatchNorm1d in eval, without gradients: one look at each thing that may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from normswap import ops
from normswap.forwards.linear_scale_batch_norm import is_factor, is_output, shapes_fit, tensors_fit
from normswap.forwards.plain import is_bare
from normswap.forwards.replaced import Replaced
from normswap.ops import at_once
from normswap.ops.dispatch import DTYPES, PLAIN, any_autocast, dense, direct_op
from normswap.ops.scale_batch_norm import folded
from normswap.regions.activations import activation_of
from normswap.regions.children import child_at, hands_on
from normswap.regions.linear import multiplier_at
from normswap.regions.rewrite import Compiled

_LINEAR, _NORM = Replaced(nn.Linear), Replaced(nn.BatchNorm1d)


class Directly:
    """None where not all is as it mostly is: what is to be done then, ``linear.Projected`` finds out."""

    def __init__(self, compiled: Compiled) -> None:
        region = compiled.region
        self.linear, self.norm, self.passes, self.unpack = region.linear, region.norm, region.passes, compiled.unpack
        self.activation = region.literal_activation()
        self.acting: Any = region.activation  # of a child, where it is no literal one
        self.factor, self.adds = region.factor, region.has("residual")
        self.scaled = bool(region.factor) or region.has("product")
        self.ends = self.adds or region.activation is not None
        self.callees, self.called = compiled.callees, compiled.callees()
        self.simple = self.activation is not None and not (self.factor or self.adds or self.passes)

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Tensor | None:
        linear, norm = children.get(self.linear), children.get(self.norm)
        if self.callees() != self.called:
            return None
        x, _, behind, scale, _, _ = self.unpack(packed)
        if self.simple and (scale is not None) is self.scaled:  # C++ looks at all the rest itself
            out = at_once.folded_linear(x, linear, scale, norm, nn.Linear, nn.BatchNorm1d)
            if out is not None:
                return self.activation(out)  # type: ignore[misc, no-any-return]
        if not _may_run() or not _are_plain(linear, norm):
            return None
        if self.factor:
            scale = multiplier_at(children, self.factor)
        if type(x) not in PLAIN or not x.is_cuda or x.dim() != 2 or x.dtype not in DTYPES:
            return None
        activation = self.activation or activation_of(child_at(children, self.acting))
        if activation is None:
            return None
        for name in self.passes:
            if not hands_on(child_at(children, name)):
                return None
        own, channels, eps = linear.__dict__["_parameters"], linear.__dict__["out_features"], norm.__dict__["eps"]
        statistics, affine = norm.__dict__["_buffers"], norm.__dict__["_parameters"]
        try:
            weight, bias = own["weight"], own["bias"]
            vectors = statistics["running_mean"], statistics["running_var"], affine["weight"], affine["bias"]
        except KeyError:  # it is kept elsewhere
            return None
        if vectors[0] is None or vectors[1] is None or channels != norm.__dict__["num_features"] or not eps > 0:
            return None
        fits = not self.scaled or is_factor(scale, x, channels)
        if (
            not fits
            or not tensors_fit(x, (weight, bias), vectors)
            or (self.adds and not is_output(behind, x, channels))
        ):
            return None
        op = direct_op("batch_norm")
        if op is None:
            return None
        if len(x) > linear.__dict__["in_features"]:
            out = at_once.folded_linear(x, linear, scale, norm, nn.Linear, nn.BatchNorm1d)
            if out is None and not shapes_fit(weight, bias, *vectors):
                return None
            if out is None:
                out = F.linear(x, *folded(weight, bias, scale, *vectors, eps))
            return activation(out if behind is None else out + behind)
        if not self.ends:
            return None
        given = vectors[0], vectors[1], None, vectors[2], vectors[3], False, 0.0, eps, behind
        return op(
            F.linear(x, weight, bias), *given, activation.code, activation.low, activation.high, dense(scale), None
        )


def _may_run() -> bool:
    """Whether the native ops may be called now, as far as that is no matter of one region."""
    return not (torch.is_grad_enabled() or any_autocast() or _has_any_global_hook()) and ops.runs_directly(False)


def _are_plain(linear: Any, norm: Any) -> bool:
    """Whether calling the two runs torch.nn's code and no more, without hooks for all modules, and by running
    statistics."""
    if type(linear) is not nn.Linear or type(norm) is not nn.BatchNorm1d or norm.__dict__["training"]:
        return False
    return is_bare(linear.__dict__) and is_bare(norm.__dict__) and _LINEAR.is_unchanged() and _NORM.is_unchanged()
