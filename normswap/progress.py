"""How far something is, on a terminal and where it takes a while; nothing anywhere else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

PATIENCE_S = 1.0
SILENT = ContextVar("SILENT", default=False)


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar that leaves no thread behind."""

    monitor_interval = 0


# tqdm's own lock is one with all processes that are forked, and stays held when one of them is killed.
Bar.set_lock(threading.RLock())


def progress(what: str, over: Iterable[Any] | None = None, unit: str = "it", total: int | None = None) -> Bar:
    """A bar over what there is to do, or one to be told of it by ``update``: how much of ``total`` is done, or of what
    nobody knows."""
    shown: dict[str, Any] = {"leave": False, "file": sys.stderr, "delay": PATIENCE_S, "disable": SILENT.get() or None}
    return Bar(over, f"normswap: {what}", total, unit=f" {unit}", unit_scale=unit == "B", **shown)


@contextmanager
def silent() -> Iterator[None]:
    """A block without bars."""
    token = SILENT.set(True)
    try:
        yield
    finally:
        SILENT.reset(token)
