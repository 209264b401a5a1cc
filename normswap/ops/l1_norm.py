"""Division by the mean magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    MAX_DIM_BACKWARD,
    direct,
    in_memory_order,
    native_op,
    native_serves,
    needs_grad,
    recorded,
    reference_gradients,
    statistic_along,
)
from normswap.ops.recorded import Norm, Numbers, Tensors, differentiable, record
from normswap.ops.rows import laid_out


def l1_norm(input: Tensor, dim: int = -1, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """``input / torch.mean(torch.abs(input), dim=dim, keepdim=True)`` in one pass over memory.

    The mean is rounded to the input's dtype before the division, as the expression does; so is what it becomes by
    ``clamp(min=minimum)`` or ``+ eps``. Without these, a row of zeros gives NaN. The output is laid out as the
    expression's: contiguous, or with the input's dims in their order in memory. Raises IndexError for a ``dim`` that
    ``input`` does not have.
    """
    bounded = eps >= 0.0 and (minimum is None or minimum >= 0.0)
    op = direct("l1_norm", input)
    if op is not None and bounded and input.is_contiguous() and dim in (-1, input.dim() - 1):
        out = op(input, eps, minimum or 0.0)
        if out is not None:
            return out
    row = input.shape[-1] if input.dim() > 0 and dim in (-1, input.dim() - 1) else 1
    if not (
        native_serves(input, elements=row)
        and 0 not in input.stride()  # of an expanded tensor the elementwise operations give strides of their own
        and -input.dim() <= dim < input.dim()
        and input.numel() > 0
        and bounded
    ):
        return reference.l1_norm(input, dim, eps, minimum)
    return in_memory_order(lambda x, along: _l1_norm(x, along, eps, minimum), input, dim)


def _l1_norm(input: Tensor, dim: int, eps: float, minimum: float | None) -> Tensor:
    least = minimum or 0.0  # a mean of magnitudes is never below 0
    if dim != input.dim() - 1:
        return _l1_norm_dim(input, dim, eps, least)
    if needs_grad(input):
        found: Tensor | None = recorded("l1_norm")(input, eps, least)
        return reference.l1_norm(input, dim, eps, minimum) if found is None else found
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.l1_norm.default(input, input.shape[-1], eps, least, out, None, 0)
    return out


def _by_kernels(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors | None:
    (grad, _), (input, *_, mean_abs, _) = grads, saved
    _, eps, *_, minimum, _ = numbers
    assert input is not None
    dx = native_op("l1_norm_backward")(grad, input, mean_abs, input.shape[-1], eps, minimum, 0)
    return None if dx is None else (dx, *(None,) * 6)


def _by_formula(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors:
    (grad, _), (input, *_) = grads, saved
    _, eps, *_, minimum, _ = numbers
    assert grad is not None
    (dx,) = reference_gradients(lambda x: reference.l1_norm(x, -1, eps, minimum or None), (input,), grad)
    return dx, *(None,) * 6


record("l1_norm", "input eps low", Norm(_by_kernels, _by_formula, of_rows=True), laid_out)


def _l1_norm_dim(input: Tensor, dim: int, eps: float, minimum: float) -> Tensor:
    def compute(learns: bool, input: Tensor) -> tuple[Tensor, Tensor | None]:
        mean_abs = statistic_along(input, dim) if learns else None
        input = input.contiguous()
        out = torch.empty_like(input)
        torch.ops.normswap.l1_norm_dim.default(input, dim, eps, minimum, out, mean_abs)
        return out, mean_abs

    def kernels(_: Any, grad: Tensor, input: Tensor, mean_abs: Tensor) -> tuple[Tensor]:
        if input.shape[dim] > MAX_DIM_BACKWARD:
            return (gradient(grad, input, mean_abs.to(input.dtype), dim, eps, minimum or None),)
        dx = torch.empty_like(input, memory_format=torch.contiguous_format)
        given = grad.contiguous(), input.contiguous(), mean_abs, dim, eps, minimum, dx
        torch.ops.normswap.l1_norm_dim_backward.default(*given)
        return (dx,)

    return differentiable(compute, kernels, lambda x: reference.l1_norm(x, dim, eps, minimum or None), input)


def gradient(
    grad: Tensor, input: Tensor, mean: Tensor, dim: int, eps: float = 0.0, minimum: float | None = None
) -> Tensor:
    """The gradient of ``l1_norm`` in closed form, in float32 or better, rounded once to the input's dtype.

    With m the ``mean`` of |x| over N elements, d = max(m, minimum) + eps and y = x / d: ``dx = dy / d - sign(x) mean(dy
    y) / d`` where m >= minimum, and ``dx = dy / d`` where the clamp cuts the mean off.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    x, dy, m = input.to(wide), grad.to(wide), mean.to(input.dtype)
    divisor = reference.l1_divisor(m, eps, minimum).to(wide)
    # mean(dy x) / d^2 would leave float32's range for rows near its ends.
    shared = (dy * (x / divisor)).mean(dim, keepdim=True) / divisor
    if minimum is not None:
        shared = shared.where(m >= minimum, 0.0)
    return (dy / divisor).addcmul_(x.sign(), shared, value=-1).to(input.dtype)
