"""The error of checkpoints, and how whatever else is raised becomes one line of it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from normswap.plans import NormswapError, listed


class CheckpointError(NormswapError):
    """A checkpoint, or the model it belongs to, cannot be read, built or written: one line says why."""


class MissingError(CheckpointError):
    """What is asked for is not on this machine: a device, or the library that builds a model."""


def check(sound: object, message: str) -> None:
    """Raise CheckpointError with ``message`` unless ``sound``."""
    if not sound:
        raise CheckpointError(message)


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def told(error: BaseException) -> str:
    """``one_line`` of an error of a person's own code, with where in it the error arose."""
    own = ("<", str(Path(__file__).parent))
    last = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)][-1:]
    return one_line(error) + "".join(f" ({f.filename}, line {f.lineno})" for f in last if "importlib" not in f.filename)


@contextmanager
def failing(
    what: str,
    kinds: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    *,
    form: str = "{} ({})",
    tell: Callable[[BaseException], str] = one_line,
    kind: type[CheckpointError] = CheckpointError,
) -> Iterator[None]:
    """What the block raises of ``kinds``, but for errors of ours, becomes a ``kind`` of it in ``form``."""
    try:
        yield
    except NormswapError:
        raise
    except kinds as error:
        raise kind(form.format(what, tell(error))) from error


running = partial(failing, kinds=(Exception, SystemExit), form="{} raised {}", tell=told)
"""``failing`` around a person's code: with where in it the error arose."""


def counted(**found: Collection[str]) -> str:
    """How many names there are of each sort, and the first ten; "" where there are none."""
    return "; ".join(f"{len(names)} {sort}: {listed(names)}" for sort, names in found.items() if names)


def strict_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises ValueError, also for an object with a key twice, or one that is half a character."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()
        if name in found:
            raise ValueError(f"the key {name!r} is there twice")
        found[name] = value
    return found


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises CheckpointError when it is missing, no JSON, or has a key twice in one object."""
    with failing(f"{path}: cannot be read", (OSError, ValueError)):
        return strict_json(path.read_bytes())
