"""A whole model on the clock: what one run waits for, and how long a user waits for several."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from normswap.timing.clock import (
    MOST_LEAD_US,
    PATIENCE_US,
    Cost,
    Function,
    Machine,
    OutOfTime,
    block,
    doubt,
    in_turns,
    patient,
    typical,
    undisturbed,
)

WARM_UP = 2
WAITING_ROUNDS = 5
LEAST_ROUNDS, MOST_ROUNDS, MOST_TIMES = 6, 12, 2
BLOCK_US, MOST_RUNS = 8_000.0, 100
BUDGET_US = 150_000.0
"""For each of the ways that are compared."""
SAME = 0.01
"""The same code, timed twice, differs by less."""
LEAST_RUNS = 7
"""Of each way that is tried and compared: one, one block to see what it takes, two more, each with one to settle."""
MOST_NOISE = 0.03
"""However noisy the clock: what seems slower by more is taken to be."""
NEAR = 0.1
"""How far from equal, as a share, device and host may be for both to count."""

Arrangement = Callable[[Collection[str]], AbstractContextManager[None]]
"""The model for a block with these candidates swapped and no others."""

Way = tuple[Callable[[], AbstractContextManager[Any]], Function]
"""What to run, and within what."""


def runs(way: Way, what: str) -> bool:
    """Whether the model runs so, else a warning says why ``what`` does not: each part was proved by itself."""
    within, run = way
    try:
        with within():
            run()
    except (torch.OutOfMemoryError, OutOfTime):
        raise
    except Exception as error:
        warnings.warn(f"{what} is not taken, it raised {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True


@dataclass(frozen=True)
class Waiting:
    """What one run of the model costs its device and its host, in microseconds."""

    device_us: float
    host_us: float

    @property
    def bound(self) -> str:
        """What the run waits for: "device" or "host"."""
        return "device" if self.device_us >= self.host_us else "host"

    @property
    def device_share(self) -> float:
        """How much of a device's microsecond saved the run gains; the rest is the host's share."""
        if self.host_us <= 0:
            return 1.0
        return min(1.0, max(0.0, 0.5 + (self.device_us / self.host_us - 1.0) / (2 * NEAR)))

    def weighed(self, cost: Cost) -> float:
        """What a cost is to the run."""
        return self.device_share * cost.device_us + (1 - self.device_share) * cost.host_us


def waiting(machine: Machine, run: Function) -> Waiting:
    """What a run costs the device with the host hidden, and the host from an idle device on."""
    with undisturbed():
        begun = machine.now_us()
        for _ in patient(machine, WARM_UP, least=1):
            run()
        hosts = [block(machine, run, 1, 0.0, tries=1).host_us for _ in patient(machine, WAITING_ROUNDS, least=1)]
        lead_us = min(MOST_LEAD_US, 1.3 * typical(hosts) + 100.0)
        blocks = [block(machine, run, 1, lead_us)]
        # A run that waits for its device itself cannot be hidden from it.
        lead_us, tries = (lead_us, 2) if blocks[0].hidden else (0.0, 1)
        more = range(WAITING_ROUNDS - 1) if machine.now_us() - begun < PATIENCE_US else ()
        blocks += [block(machine, run, 1, lead_us, tries=tries) for _ in more]
    return Waiting(typical([one.device_us for one in blocks]), typical(hosts))


@dataclass(frozen=True)
class Compared:
    """Microseconds a run of each of several ways, by the wall's clock, and the share by which the same way differs from
    itself."""

    us: tuple[float, ...]
    noise: float

    def slower(self, index: int, allowed: float = 1.0) -> bool:
        """Whether a way takes more than ``allowed`` times as long as the fastest, beyond the noise."""
        return self.us[index] > allowed * (1.0 + min(MOST_NOISE, max(SAME, self.noise))) * min(self.us)


def compare(machine: Machine, ways: Sequence[Way]) -> Compared:
    """Time several ways to run a model, as a user runs it: runs one after the other, then a wait for the last. The ways
    take turns, for longer where they differ from themselves, and are held against the first turn by turn: a host that
    others slow down for a while slows all."""
    with undisturbed():
        once = [min(max(_block(machine, way, 1), 1e-3) for _ in patient(machine, WARM_UP, least=1)) for way in ways]
        runs = min(MOST_RUNS, math.ceil(BLOCK_US / min(once)))
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(BUDGET_US / ((runs + 1) * statistics.mean(once)))))
        times: list[list[float]] = [[] for _ in ways]
        patience_us = PATIENCE_US * len(ways)
        for _ in patient(machine, MOST_TIMES, 1, patience_us):
            for index in in_turns(len(ways), patient(machine, rounds, patience_us=patience_us)):
                times[index].append(_block(machine, ways[index], runs))
            shares = [[us / first for us, first in zip(found, times[0], strict=True)] for found in times]
            noise = max((_apart(found) for found in shares[1:]), default=doubt(times[0]) / typical(times[0]))
            if noise <= SAME:
                break
    return Compared(tuple(typical(times[0]) * statistics.median(found) for found in shares), noise)


def _apart(shares: Sequence[float]) -> float:
    """How far off their median may be: what it differs by between every second one and the others."""
    return abs(statistics.median(shares[::2]) - statistics.median(shares[1::2]))


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
