"""An RMSNorm along one dim written out, all of it in float32 but for a cast before the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normswap import bounds, ops
from normswap.criterion import Magnitudes
from normswap.kinds.kind import Kind, are_numbers, flat, is_along, shape_along
from normswap.ops.dispatch import in_memory_order

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
    eps = eps or 0.0
    if rounds and (weight is None or offset or dim % x.dim() != x.dim() - 1 or not x.is_contiguous()):
        return None  # the op along another dim has no such cast
    try:
        gain = flat(weight, x, dim)
    except ValueError:
        return None

    def computed(x: Tensor, dim: int) -> Tensor:
        if dim == x.dim() - 1:
            options: dict[str, Any] = {"weight_offset": float(offset or 0.0), "cast_before_weight": rounds}
            return ops.rms_norm(x, x.shape[-1:], gain, eps, **options)  # type: ignore[no-any-return]
        return ops.rms_norm_dim(
            x, dim, weight=gain.float() + offset if gain is not None and offset else gain, eps=eps or 0.0
        )

    return in_memory_order(computed, x, dim)


def magnitudes(
    x: Tensor,
    dtype: torch.dtype,
    dim: int,
    eps: float | None,
    weight: Tensor | None,
    offset: float | None,
    rounds: bool,
) -> Magnitudes:
    attributes = {"dim": dim, "eps": eps or 0.0, "weight_offset": offset or 0.0, "cast_before_weight": rounds}
    named = {} if weight is None else {"weight": "weight"}
    return bounds.rms_by_hand({**attributes, **named}, SimpleNamespace(weight=weight), x, dtype)


def sample(dim: Any, eps: Any, weight: Tensor | None, offset: Any) -> tuple[int, ...]:
    return shape_along(dim, 33 if weight is None else weight.numel())


PARAMETERS = ("dim", "eps", "weight", "offset")
KIND = Kind("rms_norm_by_hand", FORMULA, PARAMETERS, call, magnitudes, sample, casts=True)
