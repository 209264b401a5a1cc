"""The forward of a class that ``register_norm`` was told of: the op on the values that the match finds in the module,
each an attribute that is read on every call, or a number. What is read where is settled when the class is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from normswap import ops
from normswap.forwards.replaced import Replaced
from normswap.plan import READ

_Forward = Callable[..., Tensor]


def registered_forward(kind: str) -> Callable[[Replaced, Mapping[str, Any]], _Forward]:
    """What makes the forward of a registered class of ``kind``."""

    def make(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
        argument, computed = list(inspect.signature(replaced.function).parameters)[1], _COMPUTED[kind](attributes)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else kwargs.get(argument)
            if len(args) + len(kwargs) == 1 and isinstance(x, Tensor) and replaced.is_on(self):
                return computed(x, self)
            return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

        return forward

    return make


def _reader(attributes: Mapping[str, Any], name: str) -> Callable[[Any], Any]:
    """What reads the value ``name`` of a module."""
    given = attributes.get(READ + name)
    if isinstance(given, str):
        return lambda module: getattr(module, given, None)
    return lambda module: given


def _layer_norm(attributes: Mapping[str, Any]) -> Callable[[Tensor, Any], Tensor]:
    shape, weight, bias, eps = (_reader(attributes, name) for name in ("normalized_shape", "weight", "bias", "eps"))

    def computed(x: Tensor, norm: Any) -> Tensor:
        gamma = weight(norm)
        return ops.layer_norm(x, _shape(shape(norm), gamma), gamma, bias(norm), eps(norm))

    return computed


def _rms_norm(attributes: Mapping[str, Any]) -> Callable[[Tensor, Any], Tensor]:
    shape, weight, eps = (_reader(attributes, name) for name in ("normalized_shape", "weight", "eps"))

    def computed(x: Tensor, norm: Any) -> Tensor:
        gamma = weight(norm)
        return ops.rms_norm(x, _shape(shape(norm), gamma), gamma, eps(norm))

    return computed


def _group_norm(attributes: Mapping[str, Any]) -> Callable[[Tensor, Any], Tensor]:
    groups, weight, bias, eps = (_reader(attributes, name) for name in ("num_groups", "weight", "bias", "eps"))
    return lambda x, norm: ops.group_norm(x, groups(norm), weight(norm), bias(norm), eps(norm))


def _shape(given: Any, weight: Tensor | None) -> Any:
    """What is normalised over: as given, a number for one dim, or as the weight has it."""
    if given is None and weight is not None:
        return weight.shape
    return (given,) if isinstance(given, int) else given


_COMPUTED: dict[str, Callable[[Mapping[str, Any]], Callable[[Tensor, Any], Tensor]]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
}
