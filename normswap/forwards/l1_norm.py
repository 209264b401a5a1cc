"""``x / mean(|x|)`` along one dim as a swapped module runs it.

The match holds ``dim`` and, where there is one, ``eps`` (added to the mean) or ``minimum`` (the mean is clamped to it),
each a number or the name of an attribute of the module that holds it, read anew on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from normswap import ops
from normswap.forwards import only_argument
from normswap.forwards.replaced import Replaced

_NUMBERS = (int, float)


def make_forward(replaced: Replaced, attributes: Mapping[str, Any], argument: str) -> Callable[..., Tensor]:
    """The forward of the swapped class. Raises TypeError for attributes of other types."""
    dim, eps, minimum = attributes["dim"], attributes.get("eps", 0.0), attributes.get("minimum")
    if type(dim) not in (int, str) or not {type(eps), type(minimum)} <= {int, float, str, type(None)}:
        raise TypeError(f"l1_norm: dim, eps and minimum must be numbers or names, got {dict(attributes)}")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        x = only_argument(args, kwargs, argument)
        if isinstance(x, Tensor) and replaced.is_on(self) and x.is_floating_point():
            along, added, least = _number(self, dim), _number(self, eps), _number(self, minimum)
            if type(along) is int and type(added) in _NUMBERS and (least is None or type(least) in _NUMBERS):
                return ops.l1_norm(x, along, added, least)
        return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


def _number(module: nn.Module, number: Any) -> Any:
    return getattr(module, number) if isinstance(number, str) else number
