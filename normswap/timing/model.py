"""A whole model on the clock: what one run waits for, and how long a user waits for several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from normswap.timing.choose import Waiting
from normswap.timing.clock import Machine
from normswap.timing.hidden import MOST_LEAD_US, Function, block, in_turns, spread, undisturbed

WARM_UP = 2
WAITING_ROUNDS = 3
LEAST_ROUNDS, MOST_ROUNDS = 5, 15
BLOCK_US = 8_000.0
BUDGET_US = 400_000.0
"""For each of the ways that are compared."""
SAME = 0.01
"""The same code, timed twice, differs by less."""

Arrangement = Callable[[Collection[str]], AbstractContextManager[None]]
"""The model for a block with these candidates swapped and no others."""

Way = tuple[Callable[[], AbstractContextManager[Any]], Function]
"""What to run, and within what."""


def waiting(machine: Machine, run: Function) -> Waiting:
    """What a run costs the device with the host hidden, and the host from an idle device on."""
    with undisturbed():
        for _ in range(WARM_UP):
            run()
        hosts, devices = [], []
        for _ in range(WAITING_ROUNDS):
            machine.wait()
            begun = machine.now_us()
            run()
            hosts.append(machine.now_us() - begun)
        lead_us = min(MOST_LEAD_US, 1.3 * statistics.median(hosts) + 100.0)
        for _ in range(WAITING_ROUNDS):
            devices.append(block(machine, run, 1, lead_us).device_us)
    return Waiting(statistics.median(devices), statistics.median(hosts))


@dataclass(frozen=True)
class Compared:
    """Microseconds a run of each of several ways, by the wall's clock, and these as multiples of the first's, round by
    round, with how far off they may be."""

    us: tuple[float, ...]
    ratios: tuple[float, ...]
    noise: tuple[float, ...]

    def slower(self, index: int, allowed: float = 1.0) -> bool:
        """Whether a way takes more than ``allowed`` times as long as the first, beyond the noise."""
        return self.ratios[index] > allowed * (1.0 + max(SAME, self.noise[index]))


def compare(machine: Machine, ways: Sequence[Way]) -> Compared:
    """Time several ways to run a model, as a user runs it: runs one after the other, then a wait for the last. The ways
    take turns."""
    with undisturbed():
        firsts = [_block(machine, way, 1) for way in ways for _ in range(WARM_UP)]
        once = max(firsts[-1], 1e-3)
        runs = max(1, math.ceil(BLOCK_US / once))
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(BUDGET_US / ((runs + 1) * once))))
        times: list[list[float]] = [[] for _ in ways]
        for index in in_turns(len(ways), rounds):
            times[index].append(_block(machine, ways[index], runs))
    ratios = [[one / first for one, first in zip(found, times[0], strict=True)] for found in times]
    return Compared(
        tuple(statistics.median(found) for found in times),
        tuple(statistics.median(found) for found in ratios),
        tuple(spread(found) for found in ratios),
    )


def _block(machine: Machine, way: Way, runs: int) -> float:
    within, run = way
    with within():
        run()  # what changed on entry settles
        machine.wait()
        begun = machine.now_us()
        for _ in range(runs):
            run()
        machine.wait()
        return (machine.now_us() - begun) / runs
