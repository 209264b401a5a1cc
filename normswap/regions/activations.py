"""Activations in a forward: how they are written, and what a child that is one computes, asked on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from normswap.activation import NONE, Activation
from normswap.forwards.plain import is_plain
from normswap.ops.at_once import ACTIVATIONS
from normswap.regions.flow import Op, is_literal

CHILDREN = (nn.ReLU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Sigmoid, nn.Tanh)
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
    name = LITERAL.get(op.target)
    numbers = {k: v.value for k, v in op.keywords.items() if is_literal(v)}
    rest = [v.value for v in op.args[1:] if is_literal(v)]
    if name is None or len(numbers) + len(rest) + 1 != len(op.args) + len(op.keywords):
        return None
    return _with_numbers(name, rest, numbers)


_PARAMETERS = {
    "gelu": ("approximate",),
    "leaky_relu": ("negative_slope", "inplace"),
    "clamp": ("min", "max"),
    "relu6": ("inplace",),
    "silu": ("inplace",),
    "relu": ("inplace",),
    "hardswish": ("inplace",),
}


def _with_numbers(name: str, rest: list[Any], keywords: dict[str, Any]) -> tuple[str, float, float] | None:
    """The activation with its literal parameters; None for others than are known."""
    aliases = {"min_val": "min", "max_val": "max"}
    names = _PARAMETERS.get(name, ())
    given = {**dict(zip(names, rest, strict=False)), **{aliases.get(k, k): v for k, v in keywords.items()}}
    given.pop("inplace", None)
    if len(rest) > len(names) or not {*given} <= {*names}:
        return None
    if name == "gelu":
        named = {"none": "gelu", "tanh": "gelu_tanh"}.get(given.get("approximate", "none"))
        return None if named is None else (named, 0.0, 0.0)
    if name == "relu6":
        return ("clamp", 0.0, 6.0)
    if any(type(v) not in (int, float) for v in given.values()):
        return None
    if name == "leaky_relu":
        return (name, float(given.get("negative_slope", 0.01)), 0.0)
    if name == "clamp":
        return (name, float(given.get("min", -1.0)), float(given.get("max", 1.0)))
    return (name, 0.0, 0.0)


def activation_of(child: Any) -> Activation | None:
    """What calling ``child`` does to a tensor of its own; None where that is no activation of ours."""
    cls = type(child)
    make = _ACTIVATIONS.get(cls)
    return make(child) if make is not None and is_plain(child, cls) else None


def _gelu(child: Any) -> Activation | None:
    name = {"none": "gelu", "tanh": "gelu_tanh"}.get(child.approximate)
    return None if name is None else Activation(name)


def _constant(name: str) -> Callable[[Any], Activation]:
    activation = Activation(name)
    return lambda child: activation


def _leaky_relu(child: Any) -> Activation | None:
    slope = child.negative_slope
    return Activation("leaky_relu", slope) if type(slope) in (int, float) else None


def _clamp(child: Any) -> Activation | None:
    numbers = child.min_val, child.max_val
    known = all(type(n) in (int, float) for n in numbers)
    return Activation("clamp", *numbers) if known and numbers[0] <= numbers[1] else None


_ACTIVATIONS: Mapping[type[nn.Module], Callable[[Any], Activation | None]] = {
    nn.ReLU: _constant("relu"),
    nn.SiLU: _constant("silu"),
    nn.GELU: _gelu,
    nn.LeakyReLU: _leaky_relu,
    nn.ReLU6: _clamp,
    nn.Hardtanh: _clamp,
    nn.Hardswish: _constant("hardswish"),
    nn.Sigmoid: _constant("sigmoid"),
    nn.Tanh: _constant("tanh"),
    nn.Identity: lambda child: NONE,
}
_ALWAYS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
ACTIVATIONS.update((cls, (Activation(name).code, 0.0, 0.0)) for cls, name in _ALWAYS.items())
ACTIVATIONS[nn.Identity] = (NONE.code, 0.0, 0.0)
