"""No trace on the GPU: as on the CPU, and its memory is as before too.

A step is a call of one of our functions, or an operation of torch, as on the CPU. Stopped at are STOPS of each, spread
evenly from a random first one; NORMSWAP_SEED draws others, NORMSWAP_EVERY_STEP=1 stops at every one (an hour or so).
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from traces import Stop, Trace, cluttered, raising_at_call, raising_at_op

import normswap
from normswap import copying
from normswap.timing import clock
from normswap.timing import model as whole_model

STOPS = 40
SEED = os.environ.get("NORMSWAP_SEED", "0")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No warnings, and few calls to time a site, which would be most of the steps."""
    monkeypatch.setattr(clock, "MOST_CALLS", 2)
    for name in ("LEAST_ROUNDS", "MOST_ROUNDS", "MOST_RUNS", "MOST_TIMES", "WAITING_ROUNDS"):
        monkeypatch.setattr(whole_model, name, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    gc.unfreeze()


def chosen(steps: int, name: str) -> range:
    """The steps to stop at, out of so many."""
    if os.environ.get("NORMSWAP_EVERY_STEP"):
        return range(steps)
    stride = max(1, steps // STOPS)
    return range(random.Random(f"{SEED} {name}").randrange(stride), steps, stride)


def x() -> torch.Tensor:
    return torch.randn(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def optimize_in_place(model: nn.Module, inputs: torch.Tensor) -> None:
    normswap.optimize(model, inputs, inplace=True, min_speedup=None)


def optimize_and_time(model: nn.Module, inputs: torch.Tensor) -> None:
    normswap.optimize(model, inputs, inplace=True, min_speedup=1e-6)


def optimize_a_copy(model: nn.Module, inputs: torch.Tensor) -> None:
    normswap.optimize(model, inputs)


ACTIONS: list[Callable[[nn.Module, torch.Tensor], None]] = [optimize_in_place, optimize_and_time, optimize_a_copy]


def held() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("act", ACTIONS)
def test_memory_and_all_else_are_as_before(act: Callable[[nn.Module, torch.Tensor], None]) -> None:
    act(cluttered().cuda(), x())  # cuBLAS takes its workspace
    model, inputs = cluttered().cuda(), x()
    before = Trace(model)
    memory = held()
    act(model, inputs)
    before.assert_same(model, classes=False)
    assert held() == memory
    normswap.revert(model)
    before.assert_same(model)


def counted(act: Callable[[nn.Module, torch.Tensor], None], inputs: torch.Tensor, raising: Any) -> int:
    """How many steps a run has. How much is tried out depends on what was timed: one has more of them than another."""
    with raising(10**9) as told:
        act(cluttered().cuda(), inputs)
    return len(told) if isinstance(told, list) else told.seen


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raising", (raising_at_call, raising_at_op))
@pytest.mark.parametrize("act", ACTIONS)
def test_stopped_at_any_step(act: Callable[[nn.Module, torch.Tensor], None], raising: Any) -> None:
    inputs = x()
    act(cluttered().cuda(), inputs)  # what is traced once is not traced again
    counts = [counted(act, inputs, raising) for _ in range(3)]
    gc.collect()
    gc.freeze()  # that gc.collect looks through little but what a step makes
    steps = chosen(min(counts), f"{act.__name__} {raising.__name__}")
    model, stopped = cluttered().cuda(), 0
    for step in steps:
        before = Trace(model)
        memory, where = held(), ""
        try:
            with raising(step):
                act(model, inputs)
        except Stop as stop:
            where = str(stop)
        stopped += bool(where)
        if where:  # here, where no frame that holds tensors is kept alive
            before.assert_same(model)
            assert held() == memory, (step, where)
        else:
            model = cluttered().cuda()
    assert stopped > 0.75 * len(steps) > 15  # what is timed may run less often than in each of the three counted


def test_a_copy_that_does_not_fit_is_refused_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    free = copying.free_bytes(torch.device("cuda"))
    assert free is not None and 0 < free <= torch.cuda.get_device_properties(0).total_memory
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).cuda().eval()
    memory = held()
    monkeypatch.setattr(copying, "free_bytes", lambda device: 10**6)
    with pytest.raises(normswap.NormswapError, match=r"model is 4\.2 MB on cuda:0, 1\.0 MB free.*pass inplace=True"):
        normswap.optimize(model)
    assert held() == memory
