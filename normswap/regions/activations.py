"""Activations in a forward: how they are written, and what a child that is one computes, asked on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normswap.activation import NONE, Activation
from normswap.forwards.plain import is_plain
from normswap.kinds import KINDS
from normswap.ops.at_once import ACTIVATIONS
from normswap.regions.flow import Op, is_literal
from normswap.regions.spec import Region
from normswap.regions.spelling import SPELLED

LITERAL: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, F.relu_, torch.relu_, ".relu()", ".relu_()"), "relu"),
    F.silu: "silu",
    F.gelu: "gelu",
    F.leaky_relu: "leaky_relu",
    F.relu6: "relu6",
    F.hardtanh: "clamp",
    F.hardswish: "hardswish",
    **dict.fromkeys((F.sigmoid, torch.sigmoid, ".sigmoid()"), "sigmoid"),
    **dict.fromkeys((F.tanh, torch.tanh, ".tanh()"), "tanh"),
}


def is_of(region: Region, function: Any) -> bool:
    """Whether ``function`` is what a step of ``region`` may call."""
    activation = LITERAL.get(function)
    named = region.activation[0] if isinstance(region.activation, tuple) else ""
    names = {"relu6": ("clamp",), "gelu": ("gelu", "gelu_tanh")}.get(str(activation), (activation,))
    name = SPELLED.get(function)
    if name is not None and region.kind in KINDS:
        return True
    return name in ("+", region.kind) or (name == "*" and bool(region.linear)) or named in names


def sigmoid_times(norm: Op) -> list[Op] | None:
    """``n * sigmoid(n)`` of a norm that nobody else uses."""
    users = [user for user in norm.users if user is not None]
    if not len(users) == len(norm.users) == 2:
        return None
    gate, product = sorted(users, key=lambda op: op.order)
    if LITERAL.get(gate.target) != "sigmoid" or gate.args != (norm,) or gate.users != [product]:
        return None
    written: Any = product.node
    if product.target != "*" or {*product.args} != {norm, gate} or gate.node not in (written.left, written.right):
        return None
    return [gate, product]


def called_activation(child: nn.Module | None, op: Op) -> str | tuple[str, float, float] | None:
    """The name of the ``child`` that ``op`` calls, or the function with its numbers, where that is an activation."""
    if child is not None:
        is_called = type(child) in CHILDREN and len(op.args) == 1 and not op.keywords
        return op.target[len("self.") :] if is_called else None
    name, rest = LITERAL.get(op.target), [*op.args[1:], *op.keywords.values()]
    if name is None or not all(map(is_literal, rest)):
        return None
    numbers = _NUMBERS.get(name, {})
    names = ("approximate",) if name == "gelu" else (*numbers, *(["inplace"] if name not in _OUT_OF_PLACE else []))
    if len(op.args) - 1 > len(names):
        return None
    values = dict(zip(names, op.args[1:], strict=False)) | op.keywords
    given = {key: value.value for key, value in values.items() if key != "inplace"}  # type: ignore[attr-defined]
    if name == "gelu" and {*given} <= {*names}:
        named = _GELUS.get(given.get("approximate", "none"))
        return None if named is None else (named, 0.0, 0.0)
    if not given.keys() <= numbers.keys() or any(type(v) not in (int, float) for v in given.values()):
        return None
    if name == "relu6":
        return ("clamp", 0.0, 6.0)
    low, high = (*map(float, (numbers | given).values()), 0.0, 0.0)[:2]
    return (name, low, high)


_NUMBERS = {"leaky_relu": {"negative_slope": 0.01}, "clamp": {"min_val": -1.0, "max_val": 1.0}}
_OUT_OF_PLACE = ("sigmoid", "tanh")


def activation_of(child: Any) -> Activation | None:
    """What calling ``child`` does to a tensor of its own; None where that is no activation of ours."""
    cls = type(child)
    known, make = _CONSTANT.get(cls), _MADE.get(cls)
    if (known is None and make is None) or not is_plain(child, cls):
        return None
    return known if make is None else make(child)


def numbers_of(child: Any) -> tuple[int, float, float] | None:
    """The same, as native ops take it."""
    activation = activation_of(child)
    return None if activation is None else (activation.code, activation.low, activation.high)


def _gelu(child: Any) -> Activation | None:
    name = _GELUS.get(child.approximate)
    return None if name is None else Activation(name)


def _leaky_relu(child: Any) -> Activation | None:
    slope = child.negative_slope
    return Activation("leaky_relu", slope) if type(slope) in (int, float) else None


def _clamp(child: Any) -> Activation | None:
    numbers = child.min_val, child.max_val
    known = all(type(n) in (int, float) for n in numbers)
    return Activation("clamp", *numbers) if known and numbers[0] <= numbers[1] else None


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_ALWAYS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
_CONSTANT = {nn.Identity: NONE, **{cls: Activation(name) for cls, name in _ALWAYS.items()}}
_MADE: Mapping[type[nn.Module], Callable[[Any], Activation | None]] = {
    **{nn.GELU: _gelu, nn.LeakyReLU: _leaky_relu, nn.ReLU6: _clamp, nn.Hardtanh: _clamp}
}
CHILDREN = (*_ALWAYS, *_MADE)
ACTIVATIONS.update((cls, (activation.code, 0.0, 0.0)) for cls, activation in _CONSTANT.items())
