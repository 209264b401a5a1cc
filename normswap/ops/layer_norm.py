"""Layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import (
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    has_rows,
    mixed,
    native_serves,
    needs_grad,
    reference_gradients,
    row_statistic,
)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: Activation = NONE,
) -> Any:
    """Layer normalisation over the trailing ``normalized_shape`` (Ba et al. 2016), as ``torch.nn.functional``'s.

    ``input`` is (*, *normalized_shape); ``weight`` and ``bias`` have ``normalized_shape`` and the input's dtype or
    float32. Statistics are float32 or better and two-pass. Returns a contiguous tensor of the input's shape and dtype
    (float32 under autocast). Raises what PyTorch's op raises.
    """
    if residual is not None or scale is not None or activation != NONE:
        options: dict[str, Any] = {"residual": residual, "scale": scale, "shift": shift, "activation": activation}
        return reference.layer_norm(input, normalized_shape, weight, bias, eps, **options)
    op = direct("layer_norm", input, weight, bias)
    if op is not None and has_rows(input, normalized_shape, weight):
        out = op(input, len(normalized_shape), weight, bias, eps)
        if out is not None:
            return out
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape)
    if not (
        native_serves(input, weight, bias, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and affine_dtypes_fit(input, weight, bias)
    ):
        return reference.layer_norm(input, list(shape), weight, bias, eps)
    if needs_grad(input, weight, bias):
        return _LayerNorm.apply(input, weight, bias, shape, eps)
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


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, shape: tuple[int, ...], eps: float) -> Tensor:
        mean, rstd = row_statistic(input, len(shape)), row_statistic(input, len(shape))
        out = _layer_norm_forward(input, weight, bias, shape, eps, mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or mixed(input, weight, bias):
            formula = lambda x, w, b: reference.layer_norm(x, list(ctx.shape), w, b, ctx.eps)  # noqa: E731
            return *reference_gradients(formula, (input, weight, bias), grad), None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        grads = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), mean, rstd, weight, bias, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None


def layer_norm_dim(
    x: Tensor, dim: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation over one dim."""
    return reference.layer_norm_dim(x, dim, weight, bias, eps)
