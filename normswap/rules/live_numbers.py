"""Numbers that a forward reads from self: told from other attributes here, traced with values of their own so that a
graph shows where each went, and read anew by the swapped forward on every call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from torch import nn

_ABSENT = object()


def numbers_of(module: nn.Module, names: Iterable[str]) -> dict[str, int | float]:
    """Those of ``names`` that are plain ints or floats of the instance or its class: reading one runs no code."""
    found = {}
    for name in names:
        static = inspect.getattr_static(type(module), name, _ABSENT)
        if static is _ABSENT or type(static) in (int, float):
            value = module.__dict__.get(name, static)
            if type(value) in (int, float):
                found[name] = value
    return found


def name_or_number(constant: object, values: Mapping[str, float]) -> str | int | float | None:
    """What a constant in a graph stands for: the attribute that was traced with that value, else itself; None where
    it is no number."""
    for name, value in values.items():
        if constant == value:
            return name
    return constant if isinstance(constant, (int, float)) and not isinstance(constant, bool) else None
