"""What calls cost their device and their host, apart: a machine's host queues work, and its device does it.

A wait is queued in front of a block of calls, so that the device is held while the host queues them. If the device is
still in it when the last call is queued, the time between the marks around the block is the device's alone, and what
queueing took the host's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

Function = Callable[[], object]

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


LEAST_ROUNDS, PATIENCE_US = 2, 2e6
"""What takes longer, all rounds together, is timed in fewer, but so many."""
BUDGET_US = 60e6
"""For one choice: how convolutions are computed, or which sites are kept."""


class OutOfTime(Exception):
    """The budget of a choice is spent."""


class Budget:
    """So much time that a choice may take from now on, by the host's clock of ``machine``."""

    def __init__(self, machine: Machine, us: float) -> None:
        self.machine, self.ends_us = machine, machine.now_us() + us

    @property
    def left_us(self) -> float:
        return self.ends_us - self.machine.now_us()

    def limited(self, function: Function) -> Function:
        """``function``, which raises OutOfTime instead of beginning when nothing is left."""

        def call() -> object:
            if self.left_us <= 0.0:
                raise OutOfTime
            return function()

        return call


def patient(
    machine: Machine, rounds: int, least: int = LEAST_ROUNDS, patience_us: float = PATIENCE_US
) -> Iterator[int]:
    """0 to ``rounds`` - 1, but ``least`` where these took longer than ``patience_us``."""
    begun = machine.now_us()
    for turn in range(rounds):
        if turn >= least and machine.now_us() - begun > patience_us:
            return
        yield turn


ROUNDS = 31
WARM_UP = 3
BLOCK_US = 150.0
MOST_CALLS = 32
"""In a block: its launches must fit the device's queue, of a thousand."""
FIRST_LEAD_US = 300.0
MOST_LEAD_US = 200_000.0
_TRIES = 3


@dataclass(frozen=True)
class Cost:
    """Microseconds a call, of the device and of the host, and how far off each may be."""

    device_us: float = 0.0
    host_us: float = 0.0
    device_noise_us: float = 0.0
    host_noise_us: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, calls: float) -> Cost:
        return Cost(*(us * calls for us in astuple(self)))


NO_COST = Cost()


@dataclass(frozen=True)
class Block:
    """What one block of calls took, of the device and of the host, a call; ``hidden``: the device never waited."""

    device_us: float
    host_us: float
    hidden: bool


def block(
    machine: Machine,
    function: Function,
    calls: int,
    lead_us: float,
    before: Function = lambda: None,
    tries: int = _TRIES,
) -> Block:
    """Time a block behind a wait of ``lead_us``, longer ones where the host needs more; ``before`` comes first."""
    for attempt in range(tries):
        before()
        machine.wait()
        machine.hold(lead_us)
        start, begun = machine.mark(), machine.now_us()
        for _ in range(calls):
            function()
        host_us = machine.now_us() - begun
        end = machine.mark()
        hidden = not machine.passed(start)
        device_us = machine.between_us(start, end)
        if hidden or attempt == tries - 1 or lead_us >= MOST_LEAD_US:
            break
        lead_us = min(MOST_LEAD_US, max(2 * lead_us, 2 * host_us))
    return Block(device_us / calls, host_us / calls, hidden)


def medians_us(functions: Sequence[Callable[[], object]], machine: Machine, rounds: int) -> list[float]:
    """The median of ``rounds`` calls of each function, which take turns, with nothing queued before."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            found.append(block(machine, function, 1, 0.0, tries=1).device_us)
    return [statistics.median(found) for found in times]


def costs(machine: Machine, functions: Sequence[Function]) -> list[Cost]:
    """The cost of a call of each function, of blocks that take turns in changing order."""
    with undisturbed():
        for function in functions:
            for _ in patient(machine, WARM_UP, least=1):
                function()
        firsts = [block(machine, function, 1, FIRST_LEAD_US) for function in functions]
        longest = max(max(one.device_us, one.host_us) for one in firsts)
        calls = max(1, min(MOST_CALLS, math.ceil(BLOCK_US / max(longest, 1e-3))))
        found: list[list[Block]] = [[] for _ in functions]
        for index in in_turns(len(functions), patient(machine, ROUNDS)):
            known = found[index][-1] if found[index] else firsts[index]
            lead_us = min(MOST_LEAD_US, 1.5 * known.host_us * calls + 30.0)
            found[index].append(block(machine, functions[index], calls, lead_us))
    return [_cost(blocks) for blocks in found]


def in_turns(count: int, rounds: Iterable[int]) -> Iterator[int]:
    """0 to ``count`` - 1 in every round, every second one backwards: what drifts falls on all alike."""
    for turn in rounds:
        yield from range(count) if turn % 2 == 0 else reversed(range(count))


def _cost(blocks: Sequence[Block]) -> Cost:
    device, host = [one.device_us for one in blocks], [one.host_us for one in blocks]
    return Cost(typical(device), typical(host), doubt(device), doubt(host))


def typical(values: Sequence[float]) -> float:
    """The lower quartile: what disturbs a clock only adds to it."""
    return sorted(values)[len(values) // 4]


def doubt(values: Sequence[float]) -> float:
    """How far off ``typical`` may be: what it differs by between every second value and the others."""
    return abs(typical(values[::2]) - typical(values[1::2])) if len(values) > 1 else 0.0


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's garbage collection."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
