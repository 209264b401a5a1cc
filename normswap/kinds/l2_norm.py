"""Division by the Euclidean norm along a dim, which may be clamped: ``torch.nn.functional.normalize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import ops
from normswap.criterion import Magnitudes, ulp_where_rounded
from normswap.kinds.kind import Kind, are_numbers, is_along, shape_along
from normswap.ops.dispatch import autocasts

FORMULA = """
n = norm(x, 2, dim, keepdim=True)
x / n | x / clamp(n, eps) | normalize(x, 2.0, dim, eps)
"""


def call(x: Tensor, dim: Any, eps: Any) -> Tensor | None:
    rounds = x.dtype is torch.float32 or not autocasts(x)
    serves = is_along(x, dim) and are_numbers(eps) and (eps or 0.0) >= 0.0 and rounds
    return ops.l2_norm(x, dim, eps or 0.0) if serves else None


def euclidean(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Magnitudes:
    """``x / max(norm, eps)``, the norm along one dim, or a single one."""
    divisor = norm.clamp(min=eps) if eps else norm
    wider = ulp_where_rounded(norm, 0.0, eps, dtype, KIND.c)
    dims = [d for d in range(x.dim()) if norm.dim() == 0 or norm.shape[d] == 1]

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        shared = (dy * x).abs().sum(dims, keepdim=True) / divisor.square() / norm
        return {"input": (dy.abs() / divisor + x.abs() * shared.nan_to_num(0.0)) * wider}

    return Magnitudes(x.abs() / divisor * wider, gradients)


def magnitudes(x: Tensor, dtype: torch.dtype, dim: int, eps: float | None) -> Magnitudes:
    return euclidean(x, x.norm(dim=dim, keepdim=True), eps or 0.0, dtype)


KIND = Kind("l2_norm", FORMULA, ("dim", "eps"), call, magnitudes, lambda dim, *_: shape_along(dim))
