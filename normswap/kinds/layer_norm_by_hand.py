"""A LayerNorm along one dim written out from its mean and variance, all of it in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normswap import ops
from normswap.criterion import Magnitudes, Rows
from normswap.kinds.kind import Kind, flat, is_along, shape_along
from normswap.ops.dispatch import in_memory_order

FORMULA = """
c = x - mean(x, dim, keepdim=True)
v = mean(c ** 2, dim, keepdim=True) | var(x, dim, correction=0, keepdim=True)
r = rsqrt(v + eps) | (v + eps) ** -0.5 | 1 / sqrt(v + eps)
n = c / sqrt(v + eps) | c / (v + eps) ** 0.5 | c * r
n * weight + bias | n * weight | n
"""


def call(x: Tensor, dim: Any, eps: Any, weight: Any, bias: Any, rounds: bool) -> Tensor | None:
    if rounds or not is_along(x, dim) or type(eps) not in (int, float) or 0 in x.stride():
        return None
    try:
        gain, shift = flat(weight, x, dim), flat(bias, x, dim)
    except ValueError:
        return None

    def computed(x: Tensor, dim: int) -> Tensor:
        if dim == x.dim() - 1:
            return ops.layer_norm(x, x.shape[-1:], gain, shift, eps)  # type: ignore[no-any-return]
        return ops.layer_norm_dim(x, dim, gain, shift, eps)

    return in_memory_order(computed, x, dim)


def magnitudes(
    x: Tensor, dtype: torch.dtype, dim: int, eps: float, weight: Tensor | None, bias: Tensor | None, rounds: bool
) -> Magnitudes:
    moved = x.movedim(dim, -1)
    site = SimpleNamespace(
        weight=flat(weight, x, dim), bias=flat(bias, x, dim), eps=eps, normalized_shape=moved.shape[-1:]
    )
    rows = Rows(site, moved)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        found = rows.gradients(dy.movedim(dim, -1))
        shapes = {"weight": weight, "bias": bias}
        sizes = {name: found[name].reshape(p.shape) for name, p in shapes.items() if p is not None}
        return {"input": found["input"].movedim(-1, dim), **sizes}

    return Magnitudes(rows.output().movedim(-1, dim), gradients)


def sample(dim: Any, eps: Any, weight: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    return shape_along(dim, bias if weight is None else weight)


PARAMETERS = ("dim", "eps", "weight", "bias")
KIND = Kind("layer_norm_by_hand", FORMULA, PARAMETERS, call, magnitudes, sample, casts=True)
