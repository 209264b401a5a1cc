"""Group normalisation, contiguous and channels_last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    LARGE_GROUP,
    affine_dtypes_fit,
    dense,
    direct,
    native_serves,
    needs_grad,
    reference_gradients,
)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the group normalisation of ``input`` (N, C, *) (Wu & He 2018), as
    ``torch.nn.functional.group_norm``: the norm is rounded to its dtype, then the sum.

    ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. A channels_last input gives a channels_last
    output; any other a contiguous one. Returns the input's shape and dtype (float32 under autocast). Raises what
    PyTorch's ops raise, and ValueError for an activation that is not in ``normswap.activation``.
    """
    if activation.name not in CODES:
        raise ValueError(
            f"group_norm: activation must be one of {', '.join(map(repr, CODES))}, got {activation.name!r}"
        )
    op = direct("group_norm", input, weight, bias, residual)
    if op is not None:
        out = op(input, num_groups, weight, bias, eps, activation.code, activation.low, activation.high, residual)
        if out is not None:
            return out
    group = input.numel() // max(1, input.shape[0] * num_groups) if input.dim() >= 2 else 0
    if not (
        native_serves(input, weight, bias, residual, elements=group, least=LARGE_GROUP)
        and input.dim() >= 2
        and num_groups > 0
        and input.shape[1] > 0
        and input.shape[1] % num_groups == 0
        and input.numel() != num_groups  # one value per group: PyTorch raises ValueError
        and (weight is None or weight.shape == input.shape[1:2])
        and (bias is None or bias.shape == input.shape[1:2])
        and (residual is None or residual.shape == input.shape)
        and affine_dtypes_fit(input, weight, bias)
    ):
        return reference.group_norm(input, num_groups, weight, bias, eps, activation, residual=residual)
    dtype = torch.float32 if torch.is_autocast_enabled("cuda") else input.dtype
    if residual is not None and residual.dtype != dtype:
        if dtype != torch.float32:  # the sum has a wider dtype than the norm
            return activation(group_norm(input, num_groups, weight, bias, eps) + residual)
        residual = residual.float()
    return native_group_norm(input, weight, bias, num_groups, eps, activation, residual, dtype)


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``group_norm`` by our kernel, differentiable where that is asked for, of tensors that it takes: ``dtype``, that
    of the result and the residual, is the input's or float32."""
    if needs_grad(input, weight, bias, residual):
        return _GroupNorm.apply(input, weight, bias, residual, num_groups, eps, activation, dtype)
    return _forward(input, weight, bias, residual, num_groups, eps, activation, dtype, None, None)


def _layout_of(input: Tensor) -> torch.memory_format:
    """The channels_last format of ``input`` if it has one and is not also contiguous, else contiguous_format."""
    if input.is_contiguous():
        return torch.contiguous_format
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if wanted is None or not input.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    return wanted


def _forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_groups: int,
    eps: float,
    activation: Activation,
    dtype: torch.dtype,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    layout = _layout_of(input)
    input = input.contiguous(memory_format=layout)
    if residual is not None:
        residual = residual.contiguous(memory_format=layout)
    out = torch.empty_like(input, dtype=dtype, memory_format=layout)
    torch.ops.normswap.group_norm.default(
        input,
        dense(weight),
        dense(bias),
        num_groups,
        eps,
        layout is not torch.contiguous_format,
        activation.code,
        activation.low,
        activation.high,
        residual,
        out,
        mean,
        rstd,
        0,
    )
    return out


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Any,
        bias: Any,
        residual: Any,
        num_groups: int,
        eps: float,
        activation: Activation,
        dtype: torch.dtype,
    ) -> Tensor:
        mean = torch.empty((input.shape[0], num_groups), dtype=torch.float32, device=input.device)
        rstd = torch.empty_like(mean)
        out = _forward(input, weight, bias, residual, num_groups, eps, activation, dtype, mean, rstd)
        ctx.save_for_backward(input, weight, bias, None if activation.name == "none" else residual, mean, rstd)
        ctx.num_groups, ctx.eps, ctx.activation = num_groups, eps, activation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            return *_differentiable(ctx, grad), None, None, None, None
        input, weight, bias, residual, mean, rstd = ctx.saved_tensors
        activation: Activation = ctx.activation
        wants_input, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
        layout = _layout_of(input)
        input = input.contiguous(memory_format=layout)
        passed = wants_residual and activation.name == "none"  # the sum's gradient is its summands'
        dx = torch.empty_like(input) if wants_input else None
        room = torch.empty_like if input.numel() > 0 else torch.zeros_like  # sums of nothing, which no kernel runs for
        dw = room(weight, memory_format=torch.contiguous_format) if wants_weight else None
        db = room(bias, memory_format=torch.contiguous_format) if wants_bias else None
        dense_grad = grad.contiguous(memory_format=layout)
        dr = torch.empty_like(dense_grad) if wants_residual and not passed else None
        torch.ops.normswap.group_norm_backward.default(
            dense_grad,
            input,
            dense(weight),
            dense(bias),
            None if residual is None else residual.contiguous(memory_format=layout),
            mean,
            rstd,
            ctx.num_groups,
            layout is not torch.contiguous_format,
            activation.code,
            activation.low,
            activation.high,
            dx,
            dw,
            db,
            dr,
            0,
        )
        return dx, dw, db, grad if passed else dr, None, None, None, None


def _differentiable(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients by the reference formula, which can be differentiated again."""
    input, weight, bias, residual, _, _ = ctx.saved_tensors
    num_groups, eps, activation = ctx.num_groups, ctx.eps, ctx.activation

    def formula(x: Tensor, w: Tensor | None, b: Tensor | None, r: Tensor | None) -> Tensor:
        return reference.group_norm(x, num_groups, w, b, eps, activation, residual=r)

    found = reference_gradients(formula, (input, weight, bias, residual), grad)
    if residual is None and ctx.needs_input_grad[3]:
        found[3] = grad
    return found
