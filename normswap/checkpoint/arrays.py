"""Arrays of numpy beside the tensors of a pickle, made here of plain data. What numpy makes them by is not asked: it
takes the fields of a dtype from the file, and with them addresses that it frees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_KNOWN = re.compile(
    r"b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[SU]\d{1,9}|O8|[Mm]8(?:\[(?:[1-9]\d*)?(?:[YMWDhms]|[munpfa]s)\])?"
)
"""Numbers, text, objects and times."""


class Dtype:
    """A dtype, by the name and the state that it has in a pickle."""

    def __init__(self, name: Any, align: bool = False, copy: bool = True) -> None:
        self.name, self.state = name, (3, "|")

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def made(self, done: dict[int, Any]) -> np.dtype[Any]:
        """Numpy's. Raises ValueError for one that is of something else."""
        name, order = str(self.name), str(self.state[1])
        if len(self.state) > 8:  # of times
            unit, count, *_ = self.state[8][1]
            name += "" if unit == b"generic" else f"[{int(count)}{unit.decode()}]"
        if _KNOWN.fullmatch(name) is None or order not in "=<>|":
            raise ValueError(f"numpy's dtype {name!r} is none of numbers, text, objects and times")
        return np.dtype(order + name)


class Array:
    """An array, by the state that it has in a pickle."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def made(self, done: dict[int, Any]) -> Any:
        """Numpy's. Raises ValueError where its shape is not that of what it holds."""
        _, shape, dtype, by_columns, held = self.state
        order: Any = "F" if by_columns else "C"
        listed: Any = "C" if isinstance(held, list) else order  # objects are kept by rows, however they lie
        return _filled(dtype, held, done).reshape(shape, order=listed).copy(order)


class Scalar:
    """What ``scalar`` of numpy is given in a pickle."""

    def __init__(self, dtype: Dtype, held: Any = b"") -> None:
        self.dtype, self.held = dtype, held

    def made(self, done: dict[int, Any]) -> Any:
        """Numpy's."""
        return _filled(self.dtype, self.held, done)[0]


def _filled(dtype: Dtype, held: Any, done: dict[int, Any]) -> np.ndarray[Any, Any]:
    kind = dtype.made(done)
    if not kind.itemsize:  # the empty text
        return np.zeros(1, kind)
    if not kind.hasobject:
        return np.frombuffer(held, kind)
    if not isinstance(held, list):
        raise ValueError("objects are not kept as bytes")
    flat = np.empty(len(held), kind)
    for place, one in enumerate(held):
        flat[place] = plain(one, done)
    return flat


def _array(cls: Any, shape: Any, kind: Any) -> Array:
    return Array()


def _no_bytes() -> bytes:
    return b""


MAKERS: list[Any] = [(Dtype, "numpy.dtype"), (Array, "numpy.ndarray"), (_no_bytes, "builtins.bytes")]
"""What takes the place of numpy's when a pickle is read, by the names that it has there, also before numpy 2.0; and of
what gives an empty array its bytes."""
for _module in ("numpy._core.multiarray", "numpy.core.multiarray"):
    MAKERS += [(_array, f"{_module}._reconstruct"), (Scalar, f"{_module}.scalar")]


def plain(value: Any, done: dict[int, Any]) -> Any:
    """What was read, with numpy's own arrays wherever it holds one: in tuples, sets, lists, mappings and attributes of
    objects; ``done``: by id. Raises ValueError, and what comes of damage."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Dtype | Array | Scalar):
        done[id(value)] = made = value.made(done)
        return made
    if isinstance(value, tuple | set | frozenset):
        found = [plain(one, done) for one in value]
        same = all(one is other for one, other in zip(found, value, strict=True))
        done[id(value)] = made = value if same else getattr(type(value), "_make", type(value))(found)
        return made
    done[id(value)] = value
    if isinstance(value, list):
        value[:] = [plain(one, done) for one in value]
    elif isinstance(value, Mapping):
        _replace(value, done)
    if type(own := getattr(value, "__dict__", None)) is dict:
        _replace(own, done)
    return value


def _replace(held: Any, done: dict[int, Any]) -> None:
    found = [(plain(key, done), plain(one, done)) for key, one in held.items()]
    if any(key is not old or one is not held[old] for (key, one), old in zip(found, list(held), strict=True)):
        held.clear()
        for key, one in found:
            held[key] = one
