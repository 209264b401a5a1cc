"""BatchNorm by the statistics of a single sample, without running ones: how convolutions standardise their weight
(Qiao et al. 2019)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normswap import ops
from normswap.criterion import Magnitudes, Rows
from normswap.kinds.kind import Kind

FORMULA = "batch_norm(x, None, None, weight=weight, bias=bias, training=True, momentum=momentum, eps=eps)"


def as_group_norm(x: Tensor, weight: Any, bias: Any, momentum: Any, eps: Any) -> tuple[Any, ...] | None:
    """The groups, weight, bias and eps of the GroupNorm of ``x`` that it is; None where it is none."""
    shape = x.shape
    if len(shape) < 3 or shape[0] != 1 or x.numel() <= shape[1]:
        return None
    for vector in (weight, bias):
        if vector is not None and not (isinstance(vector, Tensor) and vector.shape == shape[1:2]):
            return None
    numbers = type(momentum) in (int, float) and type(eps) in (int, float)
    return (shape[1], weight, bias, eps) if numbers and eps > 0 else None  # of no other eps does PyTorch take it


def call(x: Tensor, weight: Any, bias: Any, momentum: Any, eps: Any) -> Tensor | None:
    given = as_group_norm(x, weight, bias, momentum, eps)
    return None if given is None else ops.instance_norm(x, *given[1:])


def magnitudes(
    x: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, momentum: Any, eps: float
) -> Magnitudes:
    return Rows(SimpleNamespace(weight=weight, bias=bias, eps=eps), x, groups=x.shape[1]).magnitudes()


def sample(weight: Tensor | None, bias: Tensor | None, *_: Any) -> tuple[int, ...]:
    parameter = bias if weight is None else weight
    return (1, 5 if parameter is None else parameter.numel(), 33)


PARAMETERS = ("weight", "bias", "momentum", "eps")
NATIVE = "group_norm", as_group_norm
KIND = Kind("weight_standardization", FORMULA, PARAMETERS, call, magnitudes, sample, c_gradient=4.0, native=NATIVE)
