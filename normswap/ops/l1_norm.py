"""Division by the mean magnitude."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import native_serves, needs_grad, reference_gradients


def l1_norm(input: Tensor, dim: int = -1, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """``input / torch.mean(torch.abs(input), dim=dim, keepdim=True)`` in one pass over memory.

    The mean is rounded to the input's dtype before the division, as the expression does; so is what it becomes by
    ``clamp(min=minimum)`` and then ``+ eps``. Without these, a row of zeros gives NaN. The output is laid out as the
    expression's: contiguous, or with the input's dims in their order in memory. Our kernel serves the last dimension
    of the plain form and a contiguous output; all else is computed by PyTorch.
    """
    if not _kernel_serves(input, dim, eps, minimum):
        return reference.l1_norm(input, dim, eps, minimum)
    if needs_grad(input):
        return _L1Norm.apply(input, dim, eps, minimum)
    return _launch(input, None)


# The three functions below are all that knows which forms the kernels take.


def _kernel_serves(input: Tensor, dim: int, eps: float, minimum: float | None) -> bool:
    plain = not eps and minimum is None
    return (
        plain
        and native_serves(input)
        and input.dim() > 0
        and dim in (-1, input.dim() - 1)
        and input.shape[-1] > 0  # without elements there is no row to normalise
        and _gives_contiguous(input)
    )


def _gives_contiguous(input: Tensor) -> bool:
    """True when an elementwise expression of ``input`` is contiguous; of a transposed input it is transposed too."""
    return input.is_contiguous() or torch.empty_like(input, device="meta").is_contiguous()


def _launch(input: Tensor, mean: Tensor | None) -> Tensor:
    """The output; ``mean``, where given, is filled with the mean magnitudes as rounded to the input's dtype."""
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.l1_norm.default(input, input.shape[-1], out, mean, 0)
    return out


def _means_of(input: Tensor, dim: int) -> Tensor:
    """An uninitialised float32 value for every mean along ``dim``."""
    dim = dim % input.dim()
    return input.new_empty((*input.shape[:dim], 1, *input.shape[dim + 1 :]), dtype=torch.float32)


class _L1Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int, eps: float, minimum: float | None) -> Tensor:
        mean = _means_of(input, dim)
        out = _launch(input, mean)
        ctx.save_for_backward(input, mean)
        ctx.dim, ctx.eps, ctx.minimum = dim, eps, minimum
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, mean = ctx.saved_tensors
        if torch.is_grad_enabled():
            formula = lambda x: reference.l1_norm(x, ctx.dim, ctx.eps, ctx.minimum)  # noqa: E731
            return reference_gradients(formula, (input,), grad)[0], None, None, None
        return gradient(grad, input, mean, ctx.dim, ctx.eps, ctx.minimum), None, None, None


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
