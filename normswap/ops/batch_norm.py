"""Batch normalisation by the statistics of the batch or by running ones, with what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import (
    DTYPES,
    by_kernels,
    channel_sums,
    direct,
    kept_bias,
    native_op,
    recording,
    reference_gradients,
)
from normswap.ops.options import activation_of


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the batch normalisation of ``input`` (N, C, *) (Ioffe & Szegedy
    2015), as ``torch.nn.functional.batch_norm``: norm and sum are rounded to their dtype.

    In training the statistics are the batch's, the running ones, where given, are updated (with the unbiased variance),
    and ``num_batches_tracked`` is counted up. Running statistics, ``weight`` and ``bias`` are (C,), ``residual`` has
    the input's shape. Returns the input's dtype and layout, also under autocast. Raises what PyTorch's ops raise.
    """
    behind = (residual, activation.code, activation.low, activation.high)
    statistics = (running_mean, running_var, num_batches_tracked if training else None)
    op = direct("batch_norm", input, *statistics, weight, bias, residual, autocast=True)
    if op is not None and input.dtype in DTYPES and eps > 0:  # PyTorch may refuse others
        out = op(input, *statistics, weight, bias, training, momentum, eps, *behind)
        if out is not None:
            return out
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    return reference.batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, activation, residual=residual
    )


def batch_norm_eval(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """``batch_norm`` by running statistics; where no gradient is recorded in one pass, of up to 4096 channels."""
    op = direct("batch_norm_eval", input, running_mean, running_var, weight, bias, residual, autocast=True)
    if op is not None and input.dtype in DTYPES and eps >= 0:
        numbers = (activation.code, activation.low, activation.high)
        out = op(input, running_mean, running_var, weight, bias, eps, residual, *numbers)
        if out is not None:
            return out
    return batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps, activation, residual=residual)


@recording("batch_norm")
class _BatchNorm(torch.autograd.Function):
    """None where the kernels cannot take these tensors; nothing was updated then."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        running_mean: Any,
        running_var: Any,
        num_batches_tracked: Any,
        weight: Any,
        bias: Any,
        training: bool,
        momentum: float,
        eps: float,
        residual: Any,
        activation: int,
        low: float,
        high: float,
        scale: Any = None,
        input_bias: Any = None,
    ) -> Tensor | None:
        out, coefficients, signs = native_op("batch_norm_recorded")(
            *(input, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum, eps),
            *(residual, activation, low, high, scale, input_bias),
        )
        if out is None:
            return None
        added = None if activation == 0 or signs is not None else residual
        frozen = (None, None) if training else (running_mean, running_var)
        kept = kept_bias(weight, bias, activation), added, scale
        ctx.save_for_backward(input, weight, *kept, coefficients, signs, *frozen)
        ctx.input_bias = input_bias  # not saved: no gradient depends on its value, which may change before backward
        ctx.training, ctx.eps, ctx.activation = training, eps, (activation, low, high)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, residual, scale, coefficients, signs, *frozen = ctx.saved_tensors
        of_input, _, _, _, of_weight, of_bias, _, _, _, of_residual, _, _, _, *more = ctx.needs_input_grad
        of_scale, of_shift = more or (False, False)
        passed = of_residual and ctx.activation[0] == 0  # the sum's gradient is its summands'
        wanted = of_input, of_weight, of_bias, of_residual and not passed
        found: Sequence[Tensor | None] = (None,) * 6
        if by_kernels(grad):
            like = weight if bias is None else bias
            found = native_op("batch_norm_backward")(
                *(laid_out_as(grad, input), input, coefficients, signs, residual, weight, like, ctx.training),
                *(*ctx.activation, *wanted, scale, ctx.input_bias, ctx.eps, of_scale, of_shift, *frozen),
            )
        if all(one is None for one in found) and any((*wanted, of_scale, of_shift)):
            given = input, weight, bias, residual, scale, ctx.input_bias
            found = formula_gradients(given, frozen, signs, ctx.training, ctx.eps, ctx.activation, grad)
        dx, dw, db, dr, ds, dc = found
        if ds is not None and ds.shape != scale.shape:
            ds = ds.sum().reshape(scale.shape).to(scale.dtype)
        behind = grad if passed else dr if of_residual else None
        return dx, None, None, None, dw, db, None, None, None, behind, None, None, None, ds, dc


def laid_out_as(grad: Tensor, input: Tensor) -> Tensor:
    """``grad`` with the strides of ``input``, which is dense."""
    if grad.stride() == input.stride():
        return grad
    return torch.empty_like(input, dtype=grad.dtype).copy_(grad)


def formula_gradients(
    tensors: Sequence[Tensor | None],
    frozen: Sequence[Tensor | None],
    signs: Tensor | None,
    training: bool,
    eps: float,
    activation: tuple[int, float, float],
    grad: Tensor,
) -> list[Tensor | None]:
    """Those of input, weight, bias, residual, scale and the input's bias by the reference formula, which can be
    differentiated again; that of a residual which was not kept is the sum's. ``frozen``: the running statistics where
    they were used."""
    behind = activation_of(*activation)
    if signs is not None:
        assert tensors[0] is not None
        grad, behind = torch.where(bits_of(signs, tensors[0]), grad, 0.0), NONE

    def formula(x: Tensor, w: Any, b: Any, r: Any, scale: Any, shift: Any) -> Tensor:
        mean, var = (None if t is None else t.float() for t in frozen)
        x = reference.scaled(x, scale, shift)
        return reference.batch_norm(x, mean, var, w, b, training, 0.0, eps, behind, residual=r)

    found = reference_gradients(formula, tensors, grad)
    db = channel_sums(grad, tensors[1]) if tensors[2] is None else found[2]
    return [*found[:2], db, grad if tensors[3] is None else found[3], *found[4:]]


def bits_of(signs: Tensor, like: Tensor) -> Tensor:
    """The signs that the kernel kept, a byte a vector of memory, as booleans laid out as the dense ``like``."""
    each = like.numel() // signs.numel()
    bits = (signs[:, None] >> torch.arange(each, device=signs.device)) & 1
    return bits.bool().flatten().as_strided(like.shape, like.stride())
