"""Division by the mean magnitude along a dim, which may be clamped or added to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap import ops
from normswap.criterion import Magnitudes, ulp_where_rounded
from normswap.forwards import only_argument
from normswap.forwards.replaced import Replaced
from normswap.kinds.kind import Kind, are_numbers, is_along, shape_along

FORMULA = """
m = mean(abs(x), dim, keepdim=True)
x / m | x / (m + eps) | x / clamp(m, minimum)
"""


def call(x: Tensor, dim: Any, eps: Any, minimum: Any) -> Tensor | None:
    serves = is_along(x, dim) and are_numbers(eps, minimum)
    return ops.l1_norm(x, dim, eps or 0.0, minimum) if serves else None


def magnitudes(x: Tensor, dtype: torch.dtype, dim: int, eps: float | None, minimum: float | None) -> Magnitudes:
    eps = eps or 0.0
    mean = x.abs().mean(dim, keepdim=True)
    divisor = (mean if minimum is None else mean.clamp(min=minimum)) + eps
    # An error of the mean's own is passed on to what it is divided by, which a negative eps makes smaller.
    size = x.abs() / divisor.abs() * ((mean + abs(eps)) / divisor.abs()).clamp(min=1.0)
    wider = ulp_where_rounded(mean, eps, minimum, dtype, KIND.c)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        shared = (dy * x).abs().mean(dim, keepdim=True) / divisor.square()
        return {"input": (dy.abs() / divisor.abs() + shared) * wider}

    return Magnitudes(size * wider, gradients)


def make_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Each of the ``PARAMETERS`` is a number, or the name of an attribute of the module that holds it, read anew on
    every call. Raises TypeError for anything else."""
    given, argument = [attributes.get(name) for name in PARAMETERS], replaced.argument
    if type(given[0]) not in (int, str) or not {*map(type, given[1:])} <= {int, float, str, type(None)}:
        raise TypeError(f"l1_norm: dim, eps and minimum must be numbers or names, got {dict(attributes)}")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        x = only_argument(args, kwargs, argument)
        if isinstance(x, Tensor) and replaced.is_on(self) and x.is_floating_point():
            dim, eps, minimum = found = [getattr(self, one) if isinstance(one, str) else one for one in given]
            if type(dim) is int and all(type(v) in _NUMBERS or v is one for v, one in zip(found, given, strict=True)):
                return ops.l1_norm(x, dim, eps or 0.0, minimum)
        return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


_NUMBERS = (int, float)
PARAMETERS = ("dim", "eps", "minimum")
KIND = Kind("l1_norm", FORMULA, PARAMETERS, call, magnitudes, lambda dim, *_: shape_along(dim), forward=make_forward)
