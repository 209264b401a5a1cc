"""Division by the Euclidean norm along a dim, which may be clamped: ``torch.nn.functional.normalize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import bounds, ops
from normswap.criterion import Magnitudes
from normswap.kinds.kind import Kind, are_numbers, is_along, shape_along

FORMULA = """
n = norm(x, 2, dim, keepdim=True)
x / n | x / clamp(n, eps) | normalize(x, 2.0, dim, eps)
"""


def call(x: Tensor, dim: Any, eps: Any) -> Tensor | None:
    rounds = x.dtype is torch.float32 or not torch.is_autocast_enabled(x.device.type)
    serves = is_along(x, dim) and are_numbers(eps) and (eps or 0.0) >= 0.0 and rounds
    return ops.l2_norm(x, dim, eps or 0.0) if serves else None


def magnitudes(x: Tensor, dtype: torch.dtype, dim: int, eps: float | None) -> Magnitudes:
    return bounds.euclidean(x, x.norm(dim=dim, keepdim=True), eps or 0.0, dtype)


KIND = Kind("l2_norm", FORMULA, ("dim", "eps"), call, magnitudes, lambda dim, *_: shape_along(dim))
