"""A GPU that is not there: a host's clock, a queue, and what it costs to launch and to run something."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.timing import clock, decision, model

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
            patch.setattr(model, "MOST_RUNS", 2)  # the modules run for real
            patch.setattr(model, "MOST_ROUNDS", 8)
            patch.setattr(clock, "MOST_CALLS", 3)
            patch.setattr(clock, "ROUNDS", 9)
            yield
    finally:
        handle.remove()


LAUNCH = 5.0
WORK = 400.0
"""Microseconds a Linear costs the device: a model with some waits for it."""


def norms(device: tuple[float, float], host: tuple[float, float] = (10.0, 10.0), linear: float = WORK) -> Costs:
    """Every norm costs (PyTorch's, our) microseconds, a Linear ``linear`` of the device, all else nothing."""

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, nn.Linear):
            return LAUNCH, linear
        return (host[swapped], device[swapped]) if "Norm" in type(module).__name__ else (0.0, 0.0)

    return costs


def optimized(model: nn.Module, x: Tensor, costs: Costs, gpu: FakeGpu | None = None, **options: Any) -> nn.Module:
    with running(gpu or FakeGpu(), costs):
        return normswap.optimize(model, x, **{"on_empty": "ignore", **options})


def blocks(count: int = 3) -> nn.Module:
    layers = [layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    return randomised(nn.Sequential(*layers)).eval()


X = torch.randn(4, 8)
