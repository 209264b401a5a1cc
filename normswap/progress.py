"""How far optimize() is, on a terminal and where it takes a while; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

PATIENCE_S = 1.0


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar that leaves no thread behind."""

    monitor_interval = 0


def progress(what: str, over: Iterable[Any] | None = None, unit: str = "it") -> Bar:
    """A bar over what there is to do, or, where nobody knows how much that is, one to be told of it by ``update``."""
    return Bar(over, f"normswap: {what}", leave=False, file=sys.stderr, disable=None, delay=PATIENCE_S, unit=f" {unit}")
