"""The forward of a class that computes what a norm of torch.nn does: of a subclass, unless a flag is set, or of a class
that ``register_norm`` was told of, on the values that the match finds in the module, each an attribute that is read on
every call, or a number. What is read where is settled when the class is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap import ops
from normswap.forwards import only_argument
from normswap.forwards.replaced import Replaced, at_once_as, is_as_read
from normswap.plans import READ


def norm_forward(kind: str, arguments: Callable[[Any, Any], Any]) -> Callable[[Replaced, Mapping[str, Any]], Any]:
    """What makes the forward of a norm of this ``kind``: the op of that name, of the input and, where the class is not
    registered, of the ``arguments`` for the norm and the input."""

    def make(replaced: Replaced, attributes: Mapping[str, Any]) -> Callable[..., Tensor]:
        flag, argument, given = attributes.get("unless"), replaced.argument, arguments
        names, functions = list[Any](), vars(ops)
        if any(name.startswith(READ) for name in attributes):
            names, given = _names(kind, attributes, replaced.original), registered_arguments(kind, attributes)
        elif not is_as_read(replaced.function, attributes):
            return replaced.run
        at_once = at_once_as(replaced, kind, *names, unless=flag)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if len(args) == 1 and not kwargs else only_argument(args, kwargs, argument)
            if not torch.compiler.is_compiling():
                out: Tensor | None = at_once.call(self, x)
                if out is not None:
                    return out
            if isinstance(x, Tensor) and replaced.is_on(self) and not (flag and getattr(self, flag)):
                return functions[kind](x, *given(self, x))  # type: ignore[no-any-return]
            return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

        return forward

    return make


def _names(kind: str, attributes: Mapping[str, Any], cls: Any) -> list[Any]:
    """As ``at_once_as`` takes them; what is missing counts as None."""
    size = "num_groups" if kind == "group_norm" else "normalized_shape"
    found = [attributes.get(READ + name) for name in (size, "weight", "bias", "eps")]
    asked = cls.__getattr__ is not nn.Module.__getattr__
    return [
        (name,) if not isinstance(name, str) else name if asked or hasattr(cls, name) else (None, name)
        for name in found
    ]


def registered_arguments(kind: str, attributes: Mapping[str, Any]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """What gives the arguments of the op of ``kind``, behind its input, from a module of the class and that input."""
    if kind == "group_norm":
        groups, weight, bias, eps = (_reader(attributes, n) for n in ("num_groups", "weight", "bias", "eps"))
        return lambda norm, x: (groups(norm), weight(norm), bias(norm), eps(norm))
    shape, weight, eps = (_reader(attributes, n) for n in ("normalized_shape", "weight", "eps"))
    if kind == "rms_norm":
        return lambda norm, x: (_shape(shape(norm), gamma := weight(norm)), gamma, eps(norm))
    bias = _reader(attributes, "bias")
    return lambda norm, x: (_shape(shape(norm), gamma := weight(norm)), gamma, bias(norm), eps(norm))


def _reader(attributes: Mapping[str, Any], name: str) -> Callable[[Any], Any]:
    """What reads the value ``name`` of a module: parameters without the detour of nn.Module.__getattr__."""
    given = attributes.get(READ + name)
    if not isinstance(given, str):
        return lambda module: given

    def read(module: Any) -> Any:
        own = module._parameters
        return own[given] if given in own else getattr(module, given, None)

    return read


def _shape(given: Any, weight: Tensor | None) -> Any:
    """What is normalised over: as given, a number for one dim, or as the weight has it."""
    if given is None and weight is not None:
        return weight.shape
    return (given,) if isinstance(given, int) else given
