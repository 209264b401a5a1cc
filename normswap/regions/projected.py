"""A region of a Linear and a BatchNorm1d when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from normswap import ops
from normswap.activation import Activation
from normswap.forwards.linear_scale_batch_norm import (
    is_factor,
    is_output,
    linear_scale_batch_norm,
    multiplies,
    shapes_fit,
    tensors_fit,
)
from normswap.forwards.plain import is_plain, is_plain_itself
from normswap.ops import at_once
from normswap.ops.dispatch import DTYPES, PLAIN, any_autocast, dense, direct_op
from normswap.ops.scale_batch_norm import folded
from normswap.regions.activations import activation_of
from normswap.regions.children import hands_on
from normswap.regions.linear import has_shape_of_factor
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import ROLES


class Projected:
    """What computes a region with a Linear; None where only its own statements are sure to do the right thing.

    ``is_as_read`` tells whether the norm is; ``apart(norm, x, behind, activation)`` computes it of what the Linear
    gave."""

    def __init__(self, compiled: Compiled, is_as_read: Callable[[Any], bool], apart: Callable[..., Any]) -> None:
        region = compiled.region
        self.unpack, self.callees, self.called = compiled.unpack, compiled.callees, compiled.callees()
        self.linear, self.factor, self.norm, self.passes = region.linear, region.factor, region.norm, region.passes
        self.is_as_read, self.apart = is_as_read, apart
        self.activation, self.acting = region.literal_activation(), str(region.activation)
        self.operands = sum(step.does in ROLES for step in region.steps)
        self.leads = region.has("residual") and region.step("residual").operand == 1
        self.ends = region.has("residual") or region.activation is not None
        self.simple = self.activation is not None and {step.does for step in region.steps} <= _SIMPLE

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        if self.callees() != self.called:
            return None
        x, _, behind, scale, after, _ = self.unpack(packed)
        if (behind is not None) + (scale is not None) + (after is not None) != self.operands:  # the statements raise
            return None
        if self.leads and not (type(behind) in PLAIN and behind.is_contiguous()):  # the sum is laid out after it
            return None
        linear, norm, activation = children.get(self.linear), children.get(self.norm), self.activation
        if self.simple:  # C++ looks at all the rest itself
            out = at_once.folded_linear(x, linear, scale, norm, nn.Linear, nn.BatchNorm1d)
            if out is not None:
                return activation(out)  # type: ignore[misc]
        for name in self.passes:
            if not hands_on(children.get(name)):
                return None
        activation = activation or activation_of(children.get(self.acting))
        if activation is None or (self.factor and (scale := multiplier_at(children, self.factor)) is None):
            return None
        out = self._directly(x, linear, scale, norm, activation, behind) if after is None else None
        if out is None:
            out = linear_scale_batch_norm(x, linear, scale, norm, after, activation, behind, self.is_as_read)
        return self._apart(x, linear, scale, norm, after, activation, behind) if out is None else out

    def _directly(
        self, x: Any, linear: Any, scale: Any, norm: Any, activation: Activation, behind: Any
    ) -> Tensor | None:
        """In eval, without gradients, where all is as it mostly is: one look at each thing that may have changed."""
        if torch.is_grad_enabled() or any_autocast() or _has_any_global_hook() or not ops.runs_directly():
            return None
        if type(linear) is not nn.Linear or type(norm) is not nn.BatchNorm1d or norm.__dict__["training"]:
            return None
        if not is_plain_itself(linear) or not is_plain_itself(norm):
            return None
        if type(x) not in PLAIN or not x.is_cuda or x.dim() != 2 or x.dtype not in DTYPES:
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
        if not (scale is None or is_factor(scale, x, channels)) or not tensors_fit(x, (weight, bias), vectors):
            return None
        op = direct_op("batch_norm")
        if op is None or not (behind is None or is_output(behind, x, channels)):
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
        ending = activation.code, activation.low, activation.high
        return op(F.linear(x, weight, bias), *given, *ending, dense(scale), None)  # type: ignore[no-any-return]

    def _apart(self, x: Any, linear: Any, scale: Any, norm: Any, after: Any, activation: Any, behind: Any) -> Any:
        """The Linear, and the norm's own op."""
        if after is not None or type(x) not in PLAIN or x.dim() != 2 or not is_plain(linear, nn.Linear):
            return None
        if behind is not None and (type(behind) not in PLAIN or behind.shape != (len(x), linear.out_features)):
            return None
        if not self.is_as_read(norm) or not (scale is None or has_shape_of_factor(scale, linear)):
            return None
        return self.apart(norm, linear(x) if scale is None else linear(x) * scale, behind, activation)


_SIMPLE = {"linear", "product", "norm", "activation"}


def multiplier_at(children: Mapping[str, Any], factor: tuple[str, ...]) -> Any:
    """What the child of ``factor`` multiplies by now; None where it may do anything else."""
    name, attribute, code = factor
    child: Any = children.get(name)
    return getattr(child, attribute) if multiplies(child, code) else None
