"""Batch normalisation by the statistics of the batch or by running ones, with what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import DTYPES, direct, native_op, reference_gradients
from normswap.ops.recorded import Norm, Numbers, Tensors, laid_out_as, record


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
    if op is not None and input.dtype in DTYPES and eps > 0:
        numbers = (activation.code, activation.low, activation.high)
        out = op(input, running_mean, running_var, weight, bias, eps, residual, *numbers)
        if out is not None:
            return out
    return batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps, activation, residual=residual)


def _by_kernels(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors | None:
    (grad, _), (input, weight, bias, residual, scale, _, input_bias, *frozen, coefficients, signs) = grads, saved
    _, eps, _, _, training, code, low, high = numbers
    of_scale, _, of_input_bias = wanted[4:]
    assert grad is not None and input is not None
    found = native_op("batch_norm_backward")(
        *(laid_out_as(grad, input), input, coefficients, signs, residual, weight, bias, bool(training)),
        *(int(code), low, high, *wanted[:4], scale, input_bias, eps, of_scale, of_input_bias, *frozen),
    )
    if all(one is None for one in found):
        return None
    dx, dw, db, dr, ds, dc = found
    if ds is not None and scale is not None and ds.shape != scale.shape:
        ds = ds.sum().reshape(scale.shape).to(scale.dtype)
    return dx, dw, db, dr, ds, None, dc


def _by_formula(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors:
    """The gradient of a residual that was not kept is the sum's."""
    (grad, _), (input, weight, bias, residual, scale, _, input_bias, mean, var, _, signs) = grads, saved
    _, eps, _, _, training, code, low, high = numbers
    assert grad is not None and input is not None
    behind = Activation.of(int(code), low, high)
    if signs is not None:
        grad, behind = torch.where(bits_of(signs, input), grad, 0.0), NONE
    mean, var = (None if t is None else t.float() for t in (mean, var))

    def formula(x: Tensor, w: Any, b: Any, r: Any, scale: Any, shift: Any) -> Tensor:
        x = reference.scaled(x, scale, shift)
        return reference.batch_norm(x, mean, var, w, b, bool(training), 0.0, eps, behind, residual=r)

    tensors = input, weight, bias, residual, scale, input_bias
    dx, dw, db, dr, ds, dc = reference_gradients(formula, tensors, grad)
    behind_it = grad if wanted[3] and residual is None else dr
    return dx, dw, db, behind_it, ds, None, dc


def bits_of(signs: Tensor, like: Tensor) -> Tensor:
    """The signs that the kernel kept, a byte a vector of memory, as booleans laid out as the dense ``like``."""
    each = like.numel() // signs.numel()
    bits = (signs[:, None] >> torch.arange(each, device=signs.device)) & 1
    return bits.bool().flatten().as_strided(like.shape, like.stride())


record(
    "batch_norm",
    "input running_mean running_var batches weight bias training momentum eps residual activation low high scale "
    "input_bias",
    Norm(_by_kernels, _by_formula, of_rows=False),
)
