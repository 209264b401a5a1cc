"""Processor time that a test may ask for on a machine which others use too: beside that of a loop run just before and
just after, since a core that is shared is a slower one, and the least of a few tries."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 4


def _of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _loop() -> None:
    """A tenth of a second on an idle core."""
    for _ in range(3_000_000):
        pass


def takes_less(loops: float, work: Callable[[], object], tries: int = TRIES) -> bool:
    """Whether ``work`` once took less processor time than so many loops of a tenth of a second on an idle core."""
    for _ in range(tries):
        before = _of(_loop)
        taken = _of(work)
        if taken < loops * max(before, _of(_loop), 0.1):
            return True
    return False
