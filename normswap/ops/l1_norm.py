"""Division by the mean magnitude."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    native_serves,
    needs_grad,
    reference_gradients,
    row_statistic,
)


def l1_norm(input: Tensor, dim: int = -1) -> Tensor:
    """``input / torch.mean(torch.abs(input), dim=dim, keepdim=True)`` in one pass over memory.

    The mean is rounded to the input's dtype before the division, as the expression does. A row of zeros gives NaN.
    The output is laid out as the expression's: contiguous, or with the input's dims in their order in memory. Our
    kernel serves the last dimension and a contiguous output; all else is computed by PyTorch.
    """
    if not (
        native_serves(input)
        and input.dim() > 0
        and dim in (-1, input.dim() - 1)
        and input.shape[-1] > 0
        and _gives_contiguous(input)
    ):
        return reference.l1_norm(input, dim)
    if needs_grad(input):
        return _L1Norm.apply(input)
    return _l1_norm_forward(input, None)


def _gives_contiguous(input: Tensor) -> bool:
    """True when an elementwise expression of ``input`` is contiguous; of a transposed input it is transposed too."""
    return input.is_contiguous() or torch.empty_like(input, device="meta").is_contiguous()


def _l1_norm_forward(input: Tensor, mean_abs: Tensor | None) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.l1_norm.default(input, input.shape[-1], out, mean_abs, 0)
    return out


class _L1Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        mean_abs = row_statistic(input, 1)
        out = _l1_norm_forward(input, mean_abs)
        ctx.save_for_backward(input, mean_abs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With m = mean|x| over the N elements of a row: dx = dy / m - sign(x) sum(dy x) / (N m^2)."""
        input, mean_abs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return reference_gradients(reference.l1_norm, (input,), grad)[0]
        x, dy = input.float(), grad.float()
        shared = (dy * (x / mean_abs)).mean(-1, keepdim=True) / mean_abs  # mean_abs^2 may over- or underflow
        return (dy / mean_abs).addcmul_(x.sign(), shared, value=-1).to(input.dtype)
