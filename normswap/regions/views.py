"""A sum that is normalised in another shape: both summands are looked at in that shape instead."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor

from normswap.ops.dispatch import PLAIN

METHODS = (".view()", ".reshape()")


def of_summands(packed: Any) -> tuple[Tensor, Tensor] | None:
    """``packed`` is ((one, other), sizes): both in the shape in which their sum is looked at. None where that is not to
    be had for nothing, or where only the sum itself has that shape: one is broadcast to the other, say."""
    (one, other), sizes = packed
    if type(one) not in PLAIN or type(other) not in PLAIN or one.shape != other.shape:
        return None
    if not one.is_contiguous() or not other.is_contiguous():
        return None
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, Size)):
        (sizes,) = sizes
    for size in sizes:
        if type(size) is not int:  # a dtype, say
            return None
    return one.view(*sizes), other.view(*sizes)
