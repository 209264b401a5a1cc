"""Division by the mean magnitude along a dim, which may be clamped or added to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import bounds, ops
from normswap.kinds.kind import Kind, are_numbers, is_along, shape_along

FORMULA = """
m = mean(abs(x), dim, keepdim=True)
x / m | x / (m + eps) | x / clamp(m, minimum)
"""


def call(x: Tensor, dim: Any, eps: Any, minimum: Any) -> Tensor | None:
    serves = is_along(x, dim) and are_numbers(eps, minimum)
    return ops.l1_norm(x, dim, eps or 0.0, minimum) if serves else None


def magnitudes(x: Tensor, dtype: torch.dtype, dim: int, eps: float | None, minimum: float | None) -> Any:
    return bounds.l1_norm(x, dim, eps or 0.0, minimum, dtype)


KIND = Kind("l1_norm", FORMULA, ("dim", "eps", "minimum"), call, magnitudes, lambda dim, *_: shape_along(dim))
