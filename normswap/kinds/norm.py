"""What there is to know about a norm that torch.nn has as a class and torch.nn.functional as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


def in_rows(norm: Any) -> tuple[int, ...]:
    """The shape of some rows."""
    return (4, 3, *norm.normalized_shape)


@dataclass(frozen=True)
class Norm:
    """A norm under its ``name`` in torch.nn.functional, and the ``classes`` of torch.nn that call this ``function``.

    ``signature``: what the function takes behind its input, defaults as in Python; ``takes``: what of it our op wants,
    in order, all where that is empty; ``ignores``: what of the rest may have any value, the others have their defaults;
    ``reads``: where an instance of the class has all of it under the same names, those, and what else it has; ``rows``:
    the last dims are normalised, not those behind the channels; ``widens``: autocast runs it in float32; ``sample``: of
    an instance, or what else has its attributes, a shape to try it on.
    """

    name: str
    classes: tuple[type[nn.Module], ...]
    function: Callable[..., Any]
    signature: tuple[str, ...]
    takes: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    rows: bool = False
    widens: bool = False
    sample: Callable[[Any], tuple[int, ...]] = in_rows

    @property
    def parameters(self) -> tuple[str, ...]:
        """What our op takes behind its input."""
        return self.takes or tuple(parameter.partition("=")[0] for parameter in self.signature)

    @property
    def formula(self) -> str:
        """A call of the function, as ``regions.formula`` reads it."""
        return f"{self.name}(x, {', '.join(f'{name}={name}' for name in (*self.parameters, *self.ignores))})"
