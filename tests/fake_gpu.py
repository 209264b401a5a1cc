"""A GPU that is not there: a host's clock, a queue, and what it costs to launch and to run something."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from normswap import modules
from normswap.timing import decision, hidden, model

Costs = Callable[[nn.Module, bool], tuple[float, float]]
"""(microseconds of the host, of the device) for a call of a module, given whether it is swapped."""


class FakeGpu:
    """A ``clock.Machine`` whose time passes only by what is launched. ``noise``: by which share costs vary."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.host, self.device, self.noise = 0.0, 0.0, noise
        self.held = 0.0
        self.draw = random.Random(seed)

    def launch(self, host_us: float, device_us: float) -> None:
        self.host += host_us * self._factor()
        self.device = max(self.device, self.host) + device_us * self._factor()

    def _factor(self) -> float:
        return 1.0 + self.noise * self.draw.gauss(0.0, 1.0)

    def now_us(self) -> float:
        return self.host

    def mark(self) -> float:
        return max(self.device, self.host)

    def passed(self, mark: Any) -> bool:
        return bool(mark <= self.host)

    def between_us(self, start: Any, end: Any) -> float:
        self.host = max(self.host, end)
        return float(end - start)

    def hold(self, us: float) -> None:
        self.held += us
        self.device = max(self.device, self.host) + us

    def wait(self) -> None:
        self.host = max(self.host, self.device)


@contextlib.contextmanager
def running(gpu: FakeGpu, costs: Costs) -> Iterator[None]:
    """In the block every module called, swapped or not, costs what ``costs`` says, and models are timed on ``gpu``."""

    def called(module: nn.Module, args: Any) -> None:
        gpu.launch(*costs(module, modules.site_match(module) is not None))

    def machine_for(devices: Sequence[torch.device]) -> FakeGpu | None:
        return gpu if devices else None

    handle = nn.modules.module.register_module_forward_pre_hook(called)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decision, "machine_for", machine_for)
            patch.setattr("normswap.timing.machine_for", machine_for)
            patch.setattr(model, "MOST_RUNS", 2)  # the modules run for real
            patch.setattr(model, "MOST_ROUNDS", 8)
            patch.setattr(hidden, "MOST_CALLS", 3)
            patch.setattr(hidden, "ROUNDS", 9)
            yield
    finally:
        handle.remove()
