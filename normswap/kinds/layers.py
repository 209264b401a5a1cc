"""What there is to know about layers in a row, a norm among them, that are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from normswap.criterion import Magnitudes
from normswap.forwards.replaced import Replaced
from normswap.plan import Match


@dataclass(frozen=True)
class Layers:
    """Layers of a batch of ``rank`` dims that are the whole forward of a module, or children of an nn.Sequential.

    ``forward(replaced, attributes)``: that of the class made for it; ``magnitudes(match, module, x, unit)``: those of
    a float64 ``x``, with matmuls of a coarser ``unit``; ``sample(match, module)``: a shape to try it on, about each of
    ``means``; ``c`` and ``c_gradient``: what an error may
    be in units of 2^-24 times the magnitude.
    """

    batched: ClassVar[bool] = True

    name: str
    forward: Callable[[Replaced, Mapping[str, Any]], Callable[..., Any]]
    magnitudes: Callable[[Match, nn.Module, Tensor, float], Magnitudes]
    sample: Callable[[Match, Any], tuple[int, ...]]
    rank: int
    means: tuple[float, ...]
    c: float
    c_gradient: float
