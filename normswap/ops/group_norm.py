"""Group normalisation, contiguous and channels_last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    LARGE_GROUP,
    affine_dtypes_fit,
    by_kernels,
    channel_sums,
    dense,
    direct,
    given_bias,
    kept_bias,
    native_op,
    native_serves,
    needs_grad,
    recording,
    reference_gradients,
)
from normswap.ops.options import ROUNDED_FIRST, activation_of


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the group normalisation of ``input`` (N, C, *) (Wu & He 2018), as
    ``torch.nn.functional.group_norm``: the norm is rounded to its dtype, then the sum.

    ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. A channels_last input gives a channels_last
    output; any other a contiguous one. Returns the input's shape and dtype (float32 under autocast), or that rounded to
    ``dtype``. Raises what PyTorch's ops raise, and ValueError for an activation that is not in
    ``normswap.activation``.
    """
    if activation.name not in CODES:
        raise ValueError(
            f"group_norm: activation must be one of {', '.join(map(repr, CODES))}, got {activation.name!r}"
        )
    wide = torch.is_autocast_enabled("cuda") and input.dtype is not torch.float32
    if dtype is not None:
        if not (wide and dtype is input.dtype and residual is None and activation.name in ROUNDED_FIRST):
            return group_norm(input, num_groups, weight, bias, eps, activation, residual=residual).to(dtype)
        wide = False
    op = direct("group_norm", input, weight, bias, residual, autocast=True)
    if op is not None:
        out = op(input, num_groups, weight, bias, eps, activation.code, activation.low, activation.high, residual, wide)
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
        out = reference.group_norm(input, num_groups, weight, bias, eps, activation, residual=residual)
        return out if dtype is None else out.to(dtype)
    result = torch.float32 if wide else input.dtype
    if residual is not None and residual.dtype != result:
        if not wide and result != torch.float32:  # the sum has a wider dtype than the norm
            return activation(group_norm(input, num_groups, weight, bias, eps) + residual)
        residual = residual.float()
    return native_group_norm(input, weight, bias, num_groups, eps, activation, residual, result)


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
    numbers = activation.code, activation.low, activation.high
    if needs_grad(input, weight, bias, residual):
        wide = dtype is not input.dtype
        return _GroupNorm.apply(input, num_groups, weight, bias, eps, *numbers, residual, wide, True)
    return _forward(input, weight, bias, residual, num_groups, eps, numbers, dtype, None, None)


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
    activation: tuple[int, float, float],
    dtype: torch.dtype,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    layout = _layout_of(input)
    input = input.contiguous(memory_format=layout)
    if residual is not None:
        residual = residual.contiguous(memory_format=layout)
    out = torch.empty_like(input, dtype=dtype, memory_format=layout)
    channels_last = layout is not torch.contiguous_format
    torch.ops.normswap.group_norm.default(
        *(input, dense(weight), dense(bias), num_groups, eps, channels_last, *activation, residual, out, mean, rstd, 0)
    )
    return out


@recording("group_norm")
class _GroupNorm(torch.autograd.Function):
    """``wide``: of 16 bits a float32 output. ``served``: the caller has found that the kernels can take these tensors.
    Otherwise None where they cannot."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_groups: int,
        weight: Any,
        bias: Any,
        eps: float,
        activation: int,
        low: float,
        high: float,
        residual: Any,
        wide: bool,
        served: bool = False,
    ) -> Tensor | None:
        numbers = activation, low, high
        out, statistics = native_op("group_norm_recorded")(
            input, num_groups, weight, bias, eps, activation, low, high, residual, wide
        )
        if out is None and not served:
            return None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            statistics = torch.empty(2 * input.shape[0] * num_groups, dtype=torch.float32, device=input.device)
            dtype = torch.float32 if wide else input.dtype
            out = _forward(input, weight, bias, residual, num_groups, eps, numbers, dtype, *statistics.chunk(2))
        kept = kept_bias(weight, bias, activation), residual if activation else None
        ctx.save_for_backward(input, weight, *kept, statistics)
        ctx.num_groups, ctx.eps, ctx.activation = num_groups, eps, numbers
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_input, _, of_weight, of_bias, _, _, _, _, of_residual, *_ = ctx.needs_input_grad
        input, weight, bias, residual, statistics = ctx.saved_tensors
        groups, activation = ctx.num_groups, ctx.activation
        tensors = input, weight, given_bias(weight, bias, activation[0]), residual
        passed = of_residual and not activation[0]  # the sum's gradient is its summands'
        wanted = of_input, of_weight, of_bias, of_residual and not passed
        if not by_kernels(grad):
            tensors = input, weight, bias, residual
            dx, dw, db, dr = formula_gradients(tensors, groups, ctx.eps, activation, grad)
        else:
            found = native_op("group_norm_backward_or_none")(grad, *tensors, statistics, groups, *activation, *wanted)
            if all(one is None for one in found):
                found = kernel_gradients(tensors, statistics, groups, activation, grad, wanted)
            dx, dw, db, dr = found
        return dx, None, dw, db, None, None, None, None, grad if passed else dr, None, None


_Tensors: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]"
"""Input, weight, bias and residual."""


def kernel_gradients(
    tensors: _Tensors,
    statistics: Tensor,
    num_groups: int,
    activation: tuple[int, float, float],
    grad: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Those of ``tensors`` that are ``wanted``, of tensors that lie in any way."""
    input, weight, bias, residual = tensors
    of_input, of_weight, of_bias, of_residual = wanted
    layout = _layout_of(input)
    input = input.contiguous(memory_format=layout)
    dx = torch.empty_like(input) if of_input else None
    room = torch.empty_like if input.numel() > 0 else torch.zeros_like  # sums of nothing, which no kernel runs for
    dw = None if weight is None or not of_weight else room(weight, memory_format=torch.contiguous_format)
    db = None if bias is None or not of_bias else room(bias, memory_format=torch.contiguous_format)
    dense_grad = grad.contiguous(memory_format=layout)
    dr = torch.empty_like(dense_grad) if of_residual else None
    residual = None if residual is None else residual.contiguous(memory_format=layout)
    channels_last = layout is not torch.contiguous_format
    torch.ops.normswap.group_norm_backward.default(
        *(dense_grad, input, dense(weight), dense(bias), residual, *statistics.chunk(2), num_groups, channels_last),
        *(*activation, dx, dw, db, dr, 0),
    )
    return dx, dw, db, dr


def formula_gradients(
    tensors: _Tensors, num_groups: int, eps: float, activation: tuple[int, float, float], grad: Tensor
) -> list[Tensor | None]:
    """By the reference formula, which can be differentiated again; a bias that was not kept is none."""
    act = activation_of(*activation)

    def formula(x: Tensor, w: Tensor | None, b: Tensor | None, r: Tensor | None) -> Tensor:
        return reference.group_norm(x, num_groups, w, b, eps, act, residual=r)

    dx, dw, db, dr = reference_gradients(formula, tensors, grad)
    return [dx, dw, channel_sums(grad, tensors[1]) if tensors[2] is None else db, dr]
