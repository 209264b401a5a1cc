"""What calls cost their device and their host, apart: the device is held while the host queues them.

A wait is queued in front of a block of calls. If the device is still in it when the last call is queued, the time
between the marks around the block is the device's alone, and what queueing took the host's.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

from normswap.timing.clock import Machine

Function = Callable[[], object]

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


def costs(machine: Machine, functions: Sequence[Function]) -> list[Cost]:
    """The cost of a call of each function, of blocks that take turns in changing order."""
    with undisturbed():
        for function in functions:
            for _ in range(WARM_UP):
                function()
        firsts = [block(machine, function, 1, FIRST_LEAD_US) for function in functions]
        longest = max(max(one.device_us, one.host_us) for one in firsts)
        calls = max(1, min(MOST_CALLS, math.ceil(BLOCK_US / max(longest, 1e-3))))
        found: list[list[Block]] = [[] for _ in functions]
        for index in in_turns(len(functions), ROUNDS):
            known = found[index][-1] if found[index] else firsts[index]
            lead_us = min(MOST_LEAD_US, 1.5 * known.host_us * calls + 30.0)
            found[index].append(block(machine, functions[index], calls, lead_us))
    return [_cost(blocks) for blocks in found]


def in_turns(count: int, rounds: int) -> Iterator[int]:
    """0 to ``count`` - 1 in every round, every second one backwards: what drifts falls on all alike."""
    for turn in range(rounds):
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
