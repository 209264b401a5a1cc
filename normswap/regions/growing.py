"""A region while it is found, and what is asked of its operations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap.kinds import NORMS
from normswap.plans import Match
from normswap.regions.flow import Attribute, Constant, Leaf, Op, Value, is_literal
from normswap.regions.formula import Found

FUNCTIONS = {norm.function: (norm.name, norm.parameters) for norm in NORMS.values()}
"""The norms that are called as functions: their kind, and what they take behind their input."""
ROWS = tuple(norm.name for norm in NORMS.values() if norm.rows)
CHANNELS = tuple(norm.name for norm in NORMS.values() if not norm.rows)
ADDS: tuple[Any, ...] = ("+", torch.add, ".add()")
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass
class Growing:
    """A region while it grows: its operations, from the first to the last, and what ``Region`` wants of them."""

    kind: str
    norm: str
    x: Value
    ops: list[Op]
    steps: list[tuple[str, Op, int]]
    match: Match | None = None
    type: str = ""
    shared: bool = False
    passes: list[str] = field(default_factory=list)
    activation: str | tuple[str, float, float] | None = None
    convolution: str = ""
    linear: str = ""
    factor: tuple[str, ...] = ()
    apart: str = ""
    feeds: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    expression: Found = field(default_factory=Found)

    @property
    def last(self) -> Op:
        return self.ops[-1]


def child_of(module: nn.Module, op: Op) -> nn.Module | None:
    """The child of ``module`` that ``op`` calls."""
    name = op.target[len("self.") :] if isinstance(op.target, str) and op.target.startswith("self.") else ""
    hidden = name in module.__dict__ or inspect.getattr_static(type(module), name, None) is not None
    return None if hidden else module._modules.get(name)


def passing(module: nn.Module, op: Op) -> str:
    """The name of the child that ``op`` calls and that hands on what it gets, "" where it is none."""
    is_one = type(child_of(module, op)) in PASSING and len(op.args) == 1 and not op.keywords
    return str(op.target)[len("self.") :] if is_one else ""


def only_user(value: Op) -> Op | None:
    return value.users[0] if len(value.users) == 1 else None


def take(found: Growing, does: str, op: Op, operand: int) -> bool:
    found.ops.append(op)
    found.steps.append((does, op, operand))
    return True


def is_own(value: Value) -> bool:
    """Whether it is computed from attributes of self and constants alone: what a forward is given may be one a
    sample."""
    if isinstance(value, Leaf):
        return value.of is not None and is_own(value.of)
    return isinstance(value, (Attribute, Constant)) or (isinstance(value, Op) and all(map(is_own, value.args)))


def dims_of(op: Op) -> tuple[Any, ...]:
    values = tuple(arg.value for arg in op.args[1:] if is_literal(arg))
    return values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
