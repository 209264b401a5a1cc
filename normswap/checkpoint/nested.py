"""Which part of what a file holds is the state_dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normswap.checkpoint.errors import CheckpointError, listed

TOP = "."
PREFIXES = ("module.", "_orig_mod.", "model.")

_DEPTH = 3
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Selection:
    """The state_dict found, ``key`` under which it was (TOP for the file itself), and what else there is."""

    state: OrderedDict[str, Any]
    key: str
    others: tuple[str, ...] = ()
    module: nn.Module | None = None


def select(path: Path, loaded: object, key: str | None = None) -> Selection:
    """The state_dict under ``key`` in what a file holds, or the only one there is.

    A state_dict is a dict of tensors by name (and what modules keep as ``_extra_state``); if no dict inside is one, the
    file's own tensors are it. A pickled module stands for its state_dict. Raises CheckpointError when there is
    none, when ``key`` is not one, or when there are several and no ``key``.
    """
    candidates = dict(_candidates(loaded))
    if not candidates:
        raise CheckpointError(f"{path}: not a state_dict (names to tensors) but {_what(loaded)}")
    if key is None:
        if len(candidates) > 1:
            found = ", ".join(f"{name} ({_what(value)})" for name, value in candidates.items())
            raise CheckpointError(f"{path}: holds {len(candidates)} state_dicts: {found}; name one with key (--key)")
        key = next(iter(candidates))
    if key == TOP and TOP not in candidates and _has_tensors(loaded):
        candidates[TOP] = loaded
    if key not in candidates:
        raise CheckpointError(f"{path}: no state_dict under the key {key!r}; there is {listed(list(candidates))}")
    return _taken(loaded, key, candidates[key])


def strip(path: Path, state: OrderedDict[str, Any], prefixes: Sequence[str]) -> OrderedDict[str, Any]:
    """``state`` with each prefix, in order, removed from the names (and module versions) that begin with it.

    Raises CheckpointError when no name begins with a prefix, or when two names become one.
    """
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in state):
            raise CheckpointError(
                f"{path}: no name begins with the prefix {prefix!r}; the first is {next(iter(state))!r}"
            )
        stripped = OrderedDict((name.removeprefix(prefix), value) for name, value in state.items())
        if len(stripped) != len(state):
            raise CheckpointError(f"{path}: without the prefix {prefix!r} two tensors have one name")
        if (versions := getattr(state, "_metadata", None)) is not None:
            stripped._metadata = _stripped_versions(versions, prefix)  # type: ignore[attr-defined]
        state = stripped
    return state


def likely_prefix(names: Sequence[str]) -> str | None:
    """The prefix that wrappers put before every name, if there is one."""
    return next((p for p in PREFIXES if names and all(name.startswith(p) for name in names)), None)


def _stripped_versions(versions: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Module versions are kept by module name, for which "module." is "module" (the wrapped model) or "module.x"."""
    root = prefix.removesuffix(".")
    kept = {name: v for name, v in versions.items() if name and name != root and not name.startswith(prefix)}
    inner = {name[len(prefix) :]: v for name, v in versions.items() if name == root or name.startswith(prefix)}
    return OrderedDict({**kept, **inner})


def _candidates(loaded: object) -> Iterator[tuple[str, Any]]:
    """Every state_dict in ``loaded`` by its dotted key; ``loaded`` itself only if there is none inside."""
    if isinstance(loaded, nn.Module) or _is_state_dict(loaded):
        yield TOP, loaded
        return
    inside = list(_inside(loaded, "", _DEPTH, set()))
    yield from inside
    if not inside and _has_tensors(loaded):
        yield TOP, loaded


def _inside(value: object, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The state_dicts below ``value``, which is at ``name``; what holds none is looked into once (``seen``)."""
    if id(value) in seen:
        return
    if name and (isinstance(value, nn.Module) or _is_state_dict(value)):
        yield name, value
        return
    seen.add(id(value))
    if isinstance(value, Mapping) and depth and all(isinstance(k, str) for k in value):
        for key, inner in value.items():
            yield from _inside(inner, f"{name}.{key}" if name else key, depth - 1, seen)


def _is_state_dict(value: object) -> bool:
    return _has_tensors(value) and all(_belongs(name, entry) for name, entry in value.items())  # type: ignore[attr-defined]


def _has_tensors(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(entry, Tensor) for entry in value.values())
    )


def _belongs(name: str, entry: object) -> bool:
    return isinstance(entry, Tensor) or name.endswith(_EXTRA_STATE)


def _taken(loaded: object, key: str, value: Any) -> Selection:
    module = value if isinstance(value, nn.Module) else None
    state = value.state_dict() if module is not None else value
    kept = OrderedDict((name, entry) for name, entry in state.items() if _belongs(name, entry))
    if (versions := getattr(state, "_metadata", None)) is not None:
        kept._metadata = versions  # type: ignore[attr-defined]
    others = [n for n in state if n not in kept] if key == TOP else [n for n in loaded if n != key.partition(".")[0]]  # type: ignore[attr-defined]
    source = state if key == TOP else loaded
    return Selection(kept, key, tuple(f"{n} ({_what(source[n])})" for n in others), module)  # type: ignore[index]


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
