"""What there is to know about a norm that people write out as an expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from normswap.criterion import Magnitudes
from normswap.forwards.replaced import Replaced
from normswap.plans import Match


@dataclass(frozen=True)
class Kind:
    """A norm as a formula and as an op.

    ``formula``: lines that ``regions.formula`` reads, over "x" and the names in ``parameters``, each None where a
    spelling has no such name; ``call(x, *parameters)``: the op, or None where the expression itself must run;
    ``magnitudes(x, dtype, *parameters)``: those of the expression on a float64 ``x`` that stands for one of ``dtype``,
    the gradients by "input" and the names of parameters; ``sample(*parameters)``: a shape to try it on; ``c`` and
    ``c_gradient``: what an error may be in units of 2^-24 times the magnitude.

    With ``casts`` the expression may cast on the way; ``call`` and ``magnitudes`` then take one argument more: whether
    what is normalised is rounded before the weight. They are asked only where all else is computed in float32.

    With ``native``, the name of a native op and what gives its (size, weight, bias, eps) of the arguments of ``call``,
    None where it does not serve, C++ makes the whole call.

    Where a module as a whole is one, ``forward(replaced, attributes)`` is that of the class made for it, and
    ``values(match, module)`` the arguments of ``magnitudes`` there, by default what the match has for ``parameters``.
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    call: Callable[..., Tensor | None]
    magnitudes: Callable[..., Magnitudes]
    sample: Callable[..., tuple[int, ...]]
    casts: bool = False
    batched: ClassVar[bool] = False
    c: float = 4.0
    c_gradient: float = 8.0  # the statistic stands in it to the second power or the third, each with its own error
    forward: Callable[[Replaced, Mapping[str, Any]], Callable[..., Any]] | None = None
    values: Callable[[Match, Any], tuple[Any, ...]] | None = None
    native: tuple[str, Callable[..., tuple[Any, ...] | None]] | None = None

    def values_at(self, match: Match, module: Any) -> tuple[Any, ...]:
        """What stands at a ``module`` for the arguments of ``magnitudes``."""
        return self.values(match, module) if self.values else tuple(match.value(module, n) for n in self.parameters)

    def magnitudes_at(self, match: Match, module: Any, x: Tensor, dtype: torch.dtype) -> Magnitudes:
        """Those of a whole ``module``, its parameters by the names that they have there."""
        found = self.magnitudes(x, dtype, *self.values_at(match, module))

        def gradients(dy: Tensor) -> dict[str, Tensor]:
            of_input, terms = {"input": (by := found.gradients(dy)).pop("input")}, by.items()
            named = {match.attributes[name]: term for name, term in terms}
            return of_input | {name: term.reshape(getattr(module, name).shape) for name, term in named.items()}

        return replace(found, gradients=gradients)


def is_along(x: Tensor, dim: Any) -> bool:
    """Whether ``dim`` is one of those of ``x``."""
    return type(dim) is int and -x.dim() <= dim < x.dim()


def are_numbers(*values: Any) -> bool:
    """Whether each is a plain number or None."""
    return all(value is None or type(value) in (int, float) for value in values)


def shape_along(dim: Any, parameter: Tensor | None = None) -> tuple[int, ...]:
    """A small shape, of the size of ``parameter`` along ``dim`` and such that it broadcasts there."""
    along, size = dim if type(dim) is int else -1, 33 if parameter is None else parameter.numel()
    rank = max(3, along + 1, -along)
    if parameter is not None and along >= 0:
        rank = along + next((parameter.dim() - d for d, n in enumerate(parameter.shape) if n > 1), 1)
    return tuple(size if d == along % rank else 3 + d for d in range(rank))


def flat(parameter: Tensor | None, x: Tensor, dim: int) -> Tensor | None:
    """A weight or bias as a vector. Raises ValueError where it does not hold one value per index of ``x`` along
    ``dim``, as it broadcasts to ``x``, or is of a dtype that the ops do not take beside that of ``x``."""
    if parameter is None:
        return None
    if parameter.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{parameter.dtype} beside {x.dtype}")
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    if list(parameter.shape) != shape[x.dim() - parameter.dim() :] or parameter.numel() != x.shape[dim]:
        raise ValueError(f"{tuple(parameter.shape)} is not one value per index along dim {dim} of {tuple(x.shape)}")
    return parameter.reshape(-1)
