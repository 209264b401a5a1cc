"""An RMSNorm along one dim written out, all of it in float32 but for a cast before the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, SIXTEEN_BITS, Magnitudes, Rows, ulp_at_ties
from normswap.forwards.rms_norm import along, by_hand_forward
from normswap.kinds.kind import Kind, are_numbers, flat, is_along, shape_along
from normswap.ops.dispatch import in_memory_order
from normswap.plans import Match

FORMULA = """
s = mean(x ** 2, dim, keepdim=True)
m = s + eps | s
r = rsqrt(m) | m ** -0.5 | 1 / sqrt(m)
n = x * r | x / sqrt(m) | x / m ** 0.5
n * (offset + weight) | n * weight | n
"""


def call(x: Tensor, dim: Any, eps: Any, weight: Any, offset: Any, rounds: bool) -> Tensor | None:
    if not are_numbers(eps, offset) or not is_along(x, dim) or 0 in x.stride():
        return None
    if rounds and (weight is None or offset or dim % x.dim() != x.dim() - 1 or not x.is_contiguous()):
        return None  # the op along another dim has no such cast
    try:
        gain = flat(weight, x, dim)
    except ValueError:
        return None

    return in_memory_order(lambda x, dim: along(x, dim, gain, eps or 0.0, offset or 0.0, rounds), x, dim)


def magnitudes(
    x: Tensor,
    dtype: torch.dtype,
    dim: int,
    eps: float | None,
    weight: Tensor | None,
    offset: float | None,
    rounds: bool,
) -> Magnitudes:
    gain = None if weight is None else weight.detach().reshape(-1) + (offset or 0.0)
    moved = x.movedim(dim, -1)
    site = SimpleNamespace(weight=gain, eps=eps or 0.0, normalized_shape=moved.shape[-1:])
    rows = Rows(site, moved, centred=False)
    unit = torch.finfo(dtype).eps / 2 if rounds and dtype in SIXTEEN_BITS else 0.0
    size = rows.output() * (ulp_at_ties(rows.xhat, dtype, KIND.c) if unit else 1.0)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        found = rows.gradients(dy.movedim(dim, -1))
        found["input"] = found["input"].movedim(-1, dim)
        if weight is not None:
            # Whether what meets dy is the rounded value or the one before: those errors are independent.
            terms = dy.movedim(dim, -1).reshape(rows.xhat.shape) * rows.xhat
            independent = 4 * unit / (KIND.c_gradient * FLOAT32_ROUNDING) * terms.flatten(0, -2).norm(dim=0)
            found["weight"] = (found["weight"] + independent).reshape(weight.shape)
        return found

    return Magnitudes(size.movedim(-1, dim), gradients)


def values(match: Match, module: Any) -> tuple[Any, ...]:
    """The weight as it meets the input there."""
    dim, eps, weight, offset = (match.value(module, n) for n in ("dim", "eps", "weight", "weight_offset"))
    if weight is not None:
        weight = weight.reshape(-1, *(1,) * (-1 - match.attributes.get("weight_axis", -1)))
    return dim, eps, weight, offset, bool(match.attributes.get("cast_before_weight"))


def sample(dim: Any, eps: Any, weight: Tensor | None, *_: Any) -> tuple[int, ...]:
    return shape_along(dim, weight)


PARAMETERS = ("dim", "eps", "weight", "offset")
KIND = Kind(
    "rms_norm_by_hand",
    FORMULA,
    PARAMETERS,
    call,
    magnitudes,
    sample,
    casts=True,
    forward=by_hand_forward,
    values=values,
)
