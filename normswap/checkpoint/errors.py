"""The error of checkpoints, and how errors are told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from normswap.plan import NormswapError

_SHOWN = 10
_MAX_JSON = 256 << 20


class CheckpointError(NormswapError):
    """A checkpoint, or the model it belongs to, cannot be read, built or written: one line says why."""


class MissingError(CheckpointError):
    """What is asked for is not on this machine: a device, or the library that builds a model."""


def listed(names: list[str]) -> str:
    """The first ten names, and how many there are beyond them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def strict_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises ValueError for anything else and for an object with a key twice, or one that is no text
    (half of a pair of surrogates)."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises CheckpointError when it is missing, no JSON, or has a key twice in one object."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: larger than the {_MAX_JSON >> 20} MiB that such a file may have")
        return strict_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for name in found:
        name.encode()
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found
