"""Whether reading an attribute of a module gives what is registered there, and why not."""

from __future__ import annotations

import inspect
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
