"""What the op of a region asks of what it is given beside its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap.ops.dispatch import PLAIN


def is_alike(x: Tensor, other: Any) -> bool:
    """Whether ``other`` is None, or a plain tensor of the shape, dtype and device of ``x``."""
    return other is None or (
        type(other) in PLAIN and other.shape == x.shape and other.dtype is x.dtype and other.device == x.device
    )


def are_of(dtype: torch.dtype, *values: Any) -> bool:
    """Whether all are tensors of ``dtype``, so that the original's result is too."""
    return all(type(value) in PLAIN and value.dtype is dtype for value in values)


def are_per_sample(x: Tensor, *values: Any) -> bool:
    """True for one value a sample and feature: (B or 1, 1, ..., 1, C)."""
    wanted = (*(1,) * (x.dim() - 2), x.shape[-1])
    return all(
        type(t) in PLAIN
        and t.dim() == x.dim()
        and t.dtype is x.dtype
        and t.device == x.device
        and t.shape[1:] == wanted
        and t.shape[0] in (1, x.shape[0])
        for t in values
    )
