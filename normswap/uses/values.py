"""What an expression in the code of a model may be, as far as modules go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class One:
    """One of these modules, by their ids, and of each whether it stands there for itself, as a child does that whoever
    has it calls, and not as a part of a module that calls it as well."""

    held: dict[int, tuple[nn.Module, bool]]


@dataclass(frozen=True)
class Many:
    """What can be gone through, and gives these."""

    item: Value


@dataclass(frozen=True)
class Row:
    """A tuple; None: nothing that counts."""

    items: tuple[Value | None, ...]


@dataclass(frozen=True)
class Mapped:
    """A dict with these values."""

    item: Value


Value = One | Many | Row | Mapped


def key_of(value: Value | None) -> Any:
    """What two values that say the same share."""
    match value:
        case One(held):
            return frozenset((one, whole) for one, (_, whole) in held.items())
        case Many(item) | Mapped(item):
            return type(value), key_of(item)
        case Row(items):
            return tuple(map(key_of, items))
    return None


def depth_of(value: Value | None) -> int:
    """In how many others its modules stand."""
    match value:
        case Many(item) | Mapped(item):
            return 1 + depth_of(item)
        case Row(items):
            return 1 + max(map(depth_of, items))
    return 0


def modules_of(value: Any) -> Iterator[tuple[nn.Module, bool]]:
    """The modules in it, or itself, each with whether it stands there for itself."""
    match value:
        case nn.Module():
            yield value, True
        case One(held):
            yield from held.values()
        case Many(item) | Mapped(item):
            yield from modules_of(item)
        case Row(items):
            for one in items:
                yield from modules_of(one)


def one_of(modules: Iterable[nn.Module], whole: bool) -> One:
    """What may be any of these."""
    return One({id(one): (one, whole) for one in modules})


def children_of(module: nn.Module) -> list[nn.Module]:
    """Its children, in order."""
    return [child for child in module._modules.values() if child is not None]


LISTS = (nn.ModuleList, nn.ModuleDict)
"""They have no forward: who has one calls what is in it."""
DEEPEST = 6
"""Of what a local variable may hold, as a list in a list."""


def is_torchs(module: str) -> bool:
    """Whether the classes and functions of a Python module of that name call what they hold as a whole: PyTorch's own
    and ours."""
    own = module.startswith(("torch.", "normswap.")) and not module.startswith("torch.fx.")
    return own or module == "builtins"
