"""The clocks: a machine's host, which queues work, and its device, which does it; medians over functions in turn."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Mark = Any
"""A moment in the work of a device: events on a GPU, microseconds elsewhere."""

_CALIBRATION_CYCLES = 1_000_000


class Machine:
    """A host that queues work and a device that does it in order, each with a clock; here the host is its own device,
    so that nothing is queued and nothing can be held. Times are microseconds."""

    def now_us(self) -> float:
        """The host's clock."""
        return 1e6 * time.perf_counter()

    def mark(self) -> Mark:
        """This moment in the work queued on the device."""
        return self.now_us()

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come to ``mark``; does not wait for it."""
        return True

    def between_us(self, start: Mark, end: Mark) -> float:
        """What the device took from one mark to a later one; waits for that."""
        return float(end - start)

    def hold(self, us: float) -> None:
        """Queue so long a wait on the device: meanwhile the host can queue what is to be timed."""

    def wait(self) -> None:
        """Until the device has done all that is queued."""


class Gpus(Machine):
    """The host and the GPUs a model runs on; between marks the one that took longest counts."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)

    def mark(self) -> Mark:
        events = []
        for device in self.devices:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def passed(self, mark: Mark) -> bool:
        return all(event.query() for event in mark)

    def between_us(self, start: Mark, end: Mark) -> float:
        for event in end:
            event.synchronize()
        return max(1e3 * float(a.elapsed_time(b)) for a, b in zip(start, end, strict=True))

    def hold(self, us: float) -> None:
        for device in self.devices:
            with torch.cuda.device(device):
                torch.cuda._sleep(int(us * _cycles_a_us(device)))

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


@functools.cache
def _cycles_a_us(device: torch.device) -> float:
    """How fast the counter of torch.cuda._sleep runs."""
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / (1e3 * float(start.elapsed_time(end)))


def clock_of(device: torch.device) -> Machine:
    """The machine whose clock tells what runs on ``device``."""
    return Gpus([device]) if device.type == "cuda" else Machine()


def block_us(function: Callable[[], object], machine: Machine, calls: int = 1) -> float:
    """Microseconds of the device a call of ``function``, over a block of calls with nothing queued before it."""
    machine.wait()
    start = machine.mark()
    for _ in range(calls):
        function()
    return machine.between_us(start, machine.mark()) / calls


def medians_us(functions: Sequence[Callable[[], object]], machine: Machine, rounds: int, calls: int = 1) -> list[float]:
    """The median of ``rounds`` blocks of ``calls`` calls for each function, the functions' blocks in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            found.append(block_us(function, machine, calls))
    return [statistics.median(found) for found in times]
