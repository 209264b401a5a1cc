"""Layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    has_rows,
    native_op,
    native_serves,
    needs_grad,
    recording,
    reference_gradients,
    row_statistics,
)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the trailing ``normalized_shape`` (Ba et al. 2016), as ``torch.nn.functional``'s.

    ``input`` is (*, *normalized_shape); ``weight`` and ``bias`` have ``normalized_shape`` and the input's dtype or
    float32. Statistics are float32 or better and two-pass. Returns a contiguous tensor of the input's shape and dtype
    (float32 under autocast). Raises what PyTorch's op raises.
    """
    op = direct("layer_norm", input, weight, bias)
    if op is not None and has_rows(input, normalized_shape, weight):
        out = op(input, len(normalized_shape), weight, bias, eps)
        if out is not None:
            return out
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape)
    if not (
        native_serves(input, weight, bias)
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and affine_dtypes_fit(input, weight, bias)
        and input.numel() > 0
    ):
        return reference.layer_norm(input, list(shape), weight, bias, eps)
    if needs_grad(input, weight, bias):
        return _LayerNorm.apply(input, len(shape), weight, bias, eps, True)
    return _layer_norm_forward(input, weight, bias, shape, eps, None, None)


def _layer_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.layer_norm.default(input, dense(weight), dense(bias), math.prod(shape), eps, out, mean, rstd, 0)
    return out


@recording("layer_norm")
class _LayerNorm(torch.autograd.Function):
    """``served``: the caller has found that the kernels can take these tensors. Otherwise None where they cannot."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dims: int, weight: Any, bias: Any, eps: float, served: bool = False
    ) -> Tensor | None:
        out, statistics = None, None
        if not torch.compiler.is_compiling():
            out, statistics = native_op("layer_norm_recorded")(input, dims, weight, bias, eps)
        if out is None and not served:
            return None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            statistics = row_statistics(input, dims, 2)
            out = _layer_norm_forward(
                input, weight, bias, tuple(input.shape[-dims:]), eps, statistics[0], statistics[1]
            )
        ctx.save_for_backward(input, weight, bias, statistics)
        ctx.dims, ctx.eps = dims, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, statistics = ctx.saved_tensors
        of_input, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        shape = input.shape[-ctx.dims :]
        if not torch.is_grad_enabled():
            dx, dw, db = native_op("layer_norm_backward")(
                *(grad, input, weight, bias, statistics, None, math.prod(shape)),
                *(0, 0.0, 0.0, of_input, of_weight, of_bias, 0),
            )
            if dx is not None or dw is not None or db is not None:
                return dx, None, dw, db, None, None
        formula = lambda x, w, b: reference.layer_norm(x, list(shape), w, b, ctx.eps)  # noqa: E731
        dx, dw, db = reference_gradients(formula, (input, weight, bias), grad)
        return dx, None, dw, db, None, None
