"""The forwards of modules swapped for what they compute: one file per kind, each a guard and a call of an op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def only_argument(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """What ``forward(self, <name>)`` was called with; None when it was called otherwise, which the original refuses."""
    if len(args) + len(kwargs) != 1:
        return None
    return args[0] if args else kwargs.get(name)


def affine_of(module: nn.Module) -> tuple[Any, Any]:
    """The weight and bias of ``module``: parameters without the detour that nn.Module.__getattr__ takes to them."""
    own = module.__dict__
    registered = own["_parameters"]
    if "weight" in registered and "bias" in registered and not ("weight" in own or "bias" in own):
        return registered["weight"], registered["bias"]
    return module.weight, module.bias


def registered(module: nn.Module, where: str, name: str) -> Any:
    """A parameter or buffer of those ``where``, in the same way."""
    own = module.__dict__
    found = own[where]
    return found[name] if name in found and name not in own else getattr(module, name)
