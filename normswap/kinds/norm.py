"""What there is to know about a norm that torch.nn has as a class and torch.nn.functional as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.criterion import Magnitudes
from normswap.forwards.replaced import Replaced
from normswap.ops.dispatch import PLAIN


def in_rows(norm: Any) -> tuple[int, ...]:
    """The shape of some rows."""
    return (4, 3, *norm.normalized_shape)


@dataclass(frozen=True)
class Norm:
    """A norm under its ``name`` in torch.nn.functional, and the ``classes`` of torch.nn that call this ``function``.

    ``signature``: what the function takes behind its input, defaults as in Python; ``takes``: what of it our op wants,
    in order, all where that is empty; ``ignores``: what of the rest may have any value, the others have their defaults;
    ``updates``: what of it the function writes to in training;
    ``reads``: where an instance of the class has all of it under the same names, those, and what else it has; ``rows``:
    the last dims are normalised, not those behind the channels; ``batched``: the samples of a batch together;
    ``widens``: autocast runs it in float32; ``sample``: of an instance, or what else has its attributes, a shape to try
    it on; ``c`` and ``c_gradient``: what an error may be in units of 2^-24 times the magnitude. In float32 PyTorch's
    own CUDA ops come to 0.5 - 1.0 of these limits at worst, ours to 0.5 - 0.83, over hundreds of random shapes, means
    of 0 to 1000 and spreads of 1 and 1e-3.

    ``arguments(instance, x)``: what our op takes behind the input ``x``, None where only the instance itself is sure to
    do the right thing; ``fused(x, arguments, before, behind, scale, shift, activation, dtype)``: the op with what
    stands around it in a region, None for what it does not take; ``permuted``: the same for the channels of an image;
    ``magnitudes(instance, x)``: those of a float64 ``x``; ``swapped``: our classes in the place of ``classes``;
    ``forward(replaced, attributes)``: that of a class made for a subclass; ``alone(instance)``: why an instance is no
    site by itself, "" where it is, None where it is not to be spoken of.
    """

    name: str
    classes: tuple[type[nn.Module], ...]
    function: Callable[..., Any]
    signature: tuple[str, ...]
    arguments: Callable[[Any, Tensor], tuple[Any, ...] | None]
    fused: Callable[..., Any]
    magnitudes: Callable[[Any, Tensor], Magnitudes]
    swapped: tuple[type[nn.Module], ...] = ()
    forward: Callable[[Replaced, Mapping[str, Any]], Callable[..., Any]] | None = None
    permuted: Callable[..., Any] | None = None
    takes: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    rows: bool = False
    batched: bool = False
    widens: bool = False
    alone: Callable[[Any], str | None] = lambda norm: ""
    sample: Callable[[Any], tuple[int, ...]] = in_rows
    c: float = 4.0
    c_gradient: float = 4.0

    @property
    def parameters(self) -> tuple[str, ...]:
        """What our op takes behind its input."""
        return self.takes or tuple(parameter.partition("=")[0] for parameter in self.signature)

    @property
    def formula(self) -> str:
        """A call of the function, as ``regions.formula`` reads it."""
        return f"{self.name}(x, {', '.join(f'{name}={name}' for name in (*self.parameters, *self.ignores))})"


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
