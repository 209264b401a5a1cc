"""The one clock: a GPU's own for what runs on it, the host's elsewhere; medians over functions called in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Mark = Any
"""A moment: an event on a GPU, seconds elsewhere."""


def mark(device: torch.device) -> Mark:
    """This moment in the work queued on ``device``."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between_us(start: Mark, end: Mark) -> float:
    """Microseconds from one moment to a later one; waits for that."""
    if isinstance(start, float):
        return 1e6 * (end - start)
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def block_us(function: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Microseconds a call of ``function``, over a block of calls with nothing queued before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = mark(device)
    for _ in range(calls):
        function()
    return between_us(start, mark(device)) / calls


def medians_us(
    functions: Sequence[Callable[[], object]], device: torch.device, rounds: int, calls: int = 1
) -> list[float]:
    """The median of ``rounds`` blocks of ``calls`` calls for each function, the functions' blocks in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            found.append(block_us(function, device, calls))
    return [statistics.median(found) for found in times]
