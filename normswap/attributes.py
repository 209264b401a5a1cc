"""Whether reading an attribute of a module gives what is registered there, and why not."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normswap.plans import Reason


@dataclass(frozen=True)
class Rejection:
    """Why a forward cannot be read."""

    reason: Reason
    detail: str


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions that run when what stands in a class is called or read: a method, in whatever decorators Python's
    own are, or a property's. Asks the value itself for nothing: it may be anything."""
    match value:
        case types.FunctionType():
            yield value
        case property():
            for one in (value.fget, value.fset, value.fdel):
                yield from functions_in(one)
        case staticmethod() | classmethod():
            yield from functions_in(value.__func__)
        case functools.cached_property() | functools.partialmethod():
            yield from functions_in(value.func)
        case _ if type(value) is type(functools.cache(len)):
            yield from functions_in(value.__wrapped__)


def is_hidden(module: nn.Module, name: str) -> bool:
    """Whether ``module.name`` is another thing than the parameter, buffer or child of that name."""
    return name in module.__dict__ or inspect.getattr_static(type(module), name, None) is not None


def own_getattr(module: nn.Module) -> Rejection | None:
    """Why no attribute of self can be trusted: the class looks them up in its own way."""
    cls: Any = type(module)
    if (cls.__getattr__, cls.__getattribute__) == (nn.Module.__getattr__, object.__getattribute__):
        return None
    return Rejection(Reason.UNSUPPORTED, f"{cls.__name__} has its own __getattr__")


def modules_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under its first name, as ``named_modules`` gives them; of those that call themselves equal
    that leaves out all but one."""
    seen, waiting = set[int](), [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        children = [(f"{name}.{key}" if name else key, one) for key, one in module._modules.items() if one is not None]
        waiting += reversed(children)


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers registered on ``module`` itself, by name."""
    return {**module._parameters, **module._buffers}
