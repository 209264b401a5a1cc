"""The forward of a module that is an RMSNorm written by hand: our op where everything is as it was when the module was
read, else the module's own code. Weight, eps and every flag are read from the module on each call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from normswap import ops
from normswap.forwards import registered
from normswap.forwards.replaced import Read, Replaced, digest
from normswap.ops.at_once import AtOnce, Forward, Norm
from normswap.ops.dispatch import PLAIN, compiler_fuses, in_memory_order

_Forward = Callable[..., Tensor]

SELF = "self."
"""Before the name of an attribute of the module, in a match: the match stands on this value of it."""


def by_hand_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
    """The forward to install for a match with these attributes."""
    site = _Site(replaced, attributes)
    fields, stood_for = in_one_step(attributes), site.stood_for(None)
    stands = lambda module: stood_for if replaced.is_of(module) else None  # noqa: E731
    at_once = AtOnce(None if fields is None else Norm("rms_norm", stands, **fields))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x: Any = args[0] if args else kwargs.get(site.argument)
        alone = len(args) + len(kwargs) == 1
        if alone and not torch.compiler.is_compiling():
            out: Tensor | None = at_once.call(self, x)
            if out is not None:
                return out
        given = site.given(self, x) if alone and isinstance(x, Tensor) else None
        return replaced.run(self, *args, **kwargs) if given is None else site.normalised(x, *given)

    return forward


def in_one_step(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``Norm`` is told of a match; None where more is to be asked of a module than C++ asks, or the norm is along
    another dim than the last."""
    get, read = attributes.get, lambda given: given if isinstance(given, str) else (given,)
    along = attributes["dim"], get("weight_axis", -1), get("weight_rank", 1), get("weight_dim", 1)
    if along != (-1, -1, 1, 1) or get("functions") or any(name.startswith(SELF) for name in attributes):
        return None
    return {
        "names": ((None,), get("weight") or (None,), (None,), read(attributes["eps"])),
        "offset": read(get("weight_offset", 0.0)),
        "dtypes": tuple(map(_dtypes, attributes["dtypes"].split())),
        "rounds": get("cast_before_weight", False),
    }


def stood_for(original: Replaced, attributes: Mapping[str, Any], called: Any) -> Forward | None:
    """What a module stands for in C++, of a class with this forward that is ``called`` so; None where that was not the
    one that was read."""
    return _Site(original, attributes).stood_for(called)


def arguments_reader(
    replaced: Replaced, attributes: Mapping[str, Any]
) -> Callable[[Any, Tensor], tuple[Any, ...] | None]:
    """What gives (normalized_shape, weight, eps, weight_offset, cast_before_weight) of a module with the forward
    ``replaced`` for a contiguous ``x`` that it normalises along the last dim; None where only its own code will do."""
    site = _Site(replaced, attributes)

    def arguments(self: Any, x: Tensor) -> tuple[Any, ...] | None:
        given = site.given(self, x) if site.dim in (-1, x.dim() - 1) and x.is_contiguous() else None
        if given is None:
            return None
        weight, eps, offset = given
        return x.shape[-1:], weight, eps, float(offset), site.casts(x)

    return arguments


class _Site:
    """What was read of a class's forward, and whether it still holds."""

    def __init__(self, replaced: Replaced, attributes: Mapping[str, Any]) -> None:
        self.replaced = replaced
        base_forward = replaced.function
        self.argument = replaced.argument
        self.dim: int = attributes["dim"]
        self.eps: str | float = attributes["eps"]
        self.weight: str = attributes.get("weight", "")
        self.weight_offset: str | float = attributes.get("weight_offset", 0.0)
        self.axis: int = attributes.get("weight_axis", -1)
        self.rank: int = attributes.get("weight_rank", 1)
        self.stored: int = attributes.get("weight_dim", 1)
        self.rounds: bool = attributes.get("cast_before_weight", False)
        self.dtypes = frozenset(_dtypes(pair) for pair in attributes["dtypes"].split())
        self.settings = tuple((key[len(SELF) :], v) for key, v in attributes.items() if key.startswith(SELF))
        self.globals: dict[str, Any] = getattr(base_forward, "__globals__", {})
        names = attributes.get("methods", "").split()
        methods = {name: inspect.getattr_static(replaced.original, name, None) for name in names}
        functions = {name: self.globals.get(name) for name in attributes.get("functions", "").split()}
        self.methods = tuple((name, Read(one)) for name, one in methods.items())
        self.functions = tuple((name, Read(one)) for name, one in functions.items())
        self.known = digest((base_forward, *methods.values(), *functions.values())) == attributes["source"]
        self.verdicts: dict[Hashable, bool] = {}

    def stood_for(self, called: Any) -> Forward | None:
        """See the function of that name."""
        original = self.replaced.original
        if not self.known or original.__getattribute__ is not object.__getattribute__:
            return None
        if any(one.defaults or one.named for _, one in self.methods):  # which C++ does not compare
            return None
        return *self.replaced.known, called, *((name, one.function, one.code) for name, one in self.methods)

    def is_as_read(self, module: Any) -> bool:
        """True while the class has the functions and the instance the flags that the match was made from."""
        if not self.known or not self.replaced.is_on(module):
            return False
        for name, method in self.methods:
            if not method.is_it(getattr(self.replaced.original, name, None)) or name in module.__dict__:
                return False
        for name, function in self.functions:
            if not function.is_it(self.globals.get(name)):
                return False
        for name, value in self.settings:
            found = getattr(module, name, _MISSING)
            if type(found) is not type(value) or found != value:
                return False
        return True

    def given(self, module: Any, x: Tensor) -> tuple[Tensor | None, float, float] | None:
        """The weight as a vector, eps and offset; None where only the module's own code will do."""
        if not self.is_as_read(module):
            return None
        weight: Any = registered(module, "_parameters", self.weight) if self.weight else None
        eps, offset = self.number(module, self.eps), self.number(module, self.weight_offset)
        if eps is None or offset is None or not self.serves(x, weight):
            return None
        return weight if self.stored == 1 else weight.reshape(-1), eps, offset

    @staticmethod
    def number(module: Any, given: str | float) -> float | None:
        """The number itself, or the one in the attribute of that name now; None where that holds no number."""
        value = getattr(module, given, None) if isinstance(given, str) else given
        return value if type(value) in (float, int) else None

    def serves(self, x: Tensor, weight: Any) -> bool:
        """True when the op does what the original does with these tensors; the verdict is kept for tensors alike. What
        torch.compile fuses are the original's own statements."""
        if torch.compiler.is_compiling():
            return self._serves(x, weight) and not compiler_fuses(x, weight, elements=x.shape[self.dim])
        of_weight = (type(weight),) if type(weight) not in PLAIN else (weight.dtype, weight.shape, weight.device)
        key = type(x), x.dtype, x.shape, x.stride(), x.device, *of_weight
        known = self.verdicts.get(key)
        if known is None:
            if len(self.verdicts) >= _VERDICTS:
                self.verdicts.clear()
            known = self.verdicts[key] = self._serves(x, weight)
        return known

    def _serves(self, x: Tensor, weight: Any) -> bool:
        rank = x.dim()
        if type(x) not in PLAIN or not -rank <= self.dim < rank or 0 in x.stride():
            return False  # of an expanded tensor the elementwise operations give strides of their own
        if self.casts(x) and self.dim % rank != rank - 1:
            return False  # the op along another dim than the last has no such cast
        if not self.weight:
            return (x.dtype, None) in self.dtypes
        return (
            type(weight) in PLAIN
            and (x.dtype, weight.dtype) in self.dtypes
            and x.device == weight.device
            and self.rank <= rank
            and self.dim % rank == rank + self.axis
            and weight.dim() == self.stored
            and weight.numel() == x.shape[self.dim]
            and (self.stored == 1 or weight.shape[self.axis] == weight.numel())
        )

    def casts(self, x: Tensor) -> bool:
        """Whether what is normalised is rounded before the weight."""
        return self.rounds and x.dtype is not torch.float32

    def normalised(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        """The norm, with the strides that elementwise operations on ``x`` give."""
        given = (weight, eps, offset, self.casts(x))
        if x.is_cuda and x.is_contiguous() and not torch.is_autocast_enabled("cuda"):
            return along(x, self.dim % x.dim(), *given)
        with outside_autocast(x.device.type):
            return in_memory_order(lambda x, dim: along(x, dim, *given), x, self.dim)


def along(x: Tensor, dim: int, weight: Tensor | None, eps: float, offset: float, rounds: bool) -> Tensor:
    """The norm of a contiguous ``x``, its weight a vector."""
    if dim == x.dim() - 1:
        return ops.rms_norm(x, x.shape[-1:], weight, eps, weight_offset=float(offset), cast_before_weight=rounds)
    if rounds:  # as the op along another dim than the last cannot
        return along(x.movedim(dim, -1), x.dim() - 1, weight, eps, offset, rounds).movedim(-1, dim).contiguous()
    if weight is not None and offset:
        weight = weight.float() + offset
    return ops.rms_norm_dim(x, dim, weight=weight, eps=eps)


_MISSING = object()
_VERDICTS = 256


def _dtypes(pair: str) -> tuple[torch.dtype, torch.dtype | None]:
    x, _, weight = pair.partition("*")
    return getattr(torch, x), getattr(torch, weight) if weight else None


def outside_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast leaves the original alone: what it would cast to float32 is float32 already."""
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
