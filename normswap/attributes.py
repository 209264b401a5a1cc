"""Whether reading an attribute of a module gives what is registered there, and why not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normswap.plans import Reason


@dataclass(frozen=True)
class Rejection:
    """Why a forward cannot be read."""

    reason: Reason
    detail: str


def unreadable(module: nn.Module, reads: Sequence[str]) -> Rejection | None:
    """Why reading an attribute of self may give something else than the parameter, buffer or leaf of that name."""
    if reads and (rejection := own_getattr(module)) is not None:
        return rejection
    for name in reads:
        child = module._modules.get(name)
        registered = child is not None or isinstance(own_tensors(module).get(name), Tensor)
        if not registered or name in module.__dict__ or inspect.getattr_static(type(module), name, None) is not None:
            return Rejection(Reason.UNSUPPORTED, f"self.{name} is not a Parameter, a buffer or a child")
        if child is not None and any(True for _ in child.children()):
            return Rejection(Reason.CHILD, f"self.{name} has children")
    return None


def own_getattr(module: nn.Module) -> Rejection | None:
    """Why no attribute of self can be trusted: the class looks them up in its own way."""
    cls: Any = type(module)
    if (cls.__getattr__, cls.__getattribute__) == (nn.Module.__getattr__, object.__getattribute__):
        return None
    return Rejection(Reason.UNSUPPORTED, f"{cls.__name__} has its own __getattr__")


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers registered on ``module`` itself, by name."""
    return {**module._parameters, **module._buffers}
