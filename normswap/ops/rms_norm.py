"""Root-mean-square normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    MAX_DIM_BACKWARD,
    affine_dtypes_fit,
    dense,
    in_memory_order,
    mixed,
    native_serves,
    needs_grad,
    reference_gradients,
    row_statistic,
    statistic_along,
)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> Tensor:
    """Root-mean-square normalisation over the trailing ``normalized_shape`` (Zhang & Sennrich 2019), as
    ``torch.nn.functional.rms_norm``, times ``weight_offset + weight``.

    With ``cast_before_weight`` what is normalised is rounded to the input's dtype before the weight. ``eps=None`` means
    the machine epsilon PyTorch takes. Returns a contiguous tensor of the input's shape and dtype.
    Raises what PyTorch's op raises.
    """
    shape = tuple(normalized_shape)
    if not (
        native_serves(input, weight)
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and affine_dtypes_fit(input, weight, None)
        and not (cast_before_weight and mixed(input, weight))
    ):
        return reference.rms_norm(
            input, shape, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight
        )
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    if needs_grad(input, weight):
        return _RMSNorm.apply(input, weight, shape, epsilon, weight_offset, cast_before_weight)
    return _rms_norm_forward(input, weight, shape, epsilon, weight_offset, cast_before_weight, None)


def _rms_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    rstd: Tensor | None,
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.rms_norm.default(
        input, dense(weight), math.prod(shape), eps, weight_offset, cast_before_weight, out, rstd, 0
    )
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Any,
        shape: tuple[int, ...],
        eps: float,
        weight_offset: float,
        cast_before_weight: bool,
    ) -> Tensor:
        rstd = row_statistic(input, len(shape))
        out = _rms_norm_forward(input, weight, shape, eps, weight_offset, cast_before_weight, rstd)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        ctx.weight_offset, ctx.cast_before_weight = weight_offset, cast_before_weight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or mixed(input, weight):
            order = {"weight_offset": ctx.weight_offset, "cast_before_weight": ctx.cast_before_weight}
            formula = lambda x, w: reference.rms_norm(x, ctx.shape, w, ctx.eps, **order)  # noqa: E731
            return *reference_gradients(formula, (input, weight), grad), None, None, None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:2]]
        factor = weight + ctx.weight_offset if weight is not None and ctx.weight_offset else weight
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), rstd, factor, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None, None, None


def rms_norm_dim(x: Tensor, dim: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2, dim) + eps)`` in one pass over memory, times ``weight`` with one value per index of ``dim``.

    Computed in float32. The output is contiguous, or has the input's dims in their order in memory. Raises IndexError
    for a ``dim`` that ``x`` does not have.
    """
    if not (
        native_serves(x, weight)
        and -x.dim() <= dim < x.dim()
        and x.shape[dim] > 0
        and (weight is None or (weight.dim() == 1 and len(weight) == x.shape[dim]))
    ):
        return reference.rms_norm_dim(x, dim, weight, eps)
    order = in_memory_order(x)
    if order is not None:
        return torch.permute(
            _rms_norm_dim(x.permute(order), order.index(dim % x.dim()), weight, eps),
            [order.index(i) for i in range(x.dim())],
        )
    return _rms_norm_dim(x, dim % x.dim(), weight, eps)


def _rms_norm_dim(x: Tensor, dim: int, weight: Tensor | None, eps: float) -> Tensor:
    if dim == x.dim() - 1:
        return rms_norm(x, x.shape[-1:], weight, eps)
    if needs_grad(x, weight):
        return _RMSNormDim.apply(x, weight, dim, eps)
    return _rms_norm_dim_forward(x, weight, dim, eps, None)


def _rms_norm_dim_forward(x: Tensor, weight: Tensor | None, dim: int, eps: float, rstd: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops.normswap.rms_norm_dim.default(x, dense(weight), dim, eps, out, rstd)
    return out


class _RMSNormDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, dim: int, eps: float) -> Tensor:
        rstd = statistic_along(x, dim)
        out = _rms_norm_dim_forward(x, weight, dim, eps, rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.dim, ctx.eps = dim, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or x.shape[ctx.dim] > MAX_DIM_BACKWARD:
            formula = lambda x, w: reference.rms_norm_dim(x, ctx.dim, w, ctx.eps)  # noqa: E731
            return *reference_gradients(formula, (x, weight), grad), None, None
        x, grad_x = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        torch.ops.normswap.rms_norm_dim_backward.default(
            grad.contiguous(), x, dense(weight), rstd, ctx.dim, grad_x, grad_weight
        )
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None, None
