"""The clocks, and what calls cost the device and the host apart, on a GPU that is not there."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from fake_gpu import FakeGpu

from normswap.timing import clock
from normswap.timing.clock import Cost


def test_functions_take_turns_and_medians_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [0.0], []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def lasting(name: str, *seconds: float):
        left = iter(seconds)

        def function() -> None:
            done.append(name)
            now[0] += next(left)

        return function

    functions = [lasting("a", 1, 9, 3), lasting("b", 1, 1, 1)]
    assert clock.medians_us(functions, clock.Machine(), rounds=3) == pytest.approx([3e6, 1e6])
    assert "".join(done) == "ab" * 3


def test_the_host_is_the_clock_of_what_runs_there() -> None:
    machine = clock.clock_of(torch.device("cpu"))
    start = machine.mark()
    time.sleep(0.002)
    machine.hold(1e9)
    machine.wait()
    assert machine.passed(start) and 2e3 <= machine.between_us(start, machine.mark()) < 1e6


@pytest.mark.parametrize(("host", "device"), [(10.0, 2.0), (2.0, 10.0), (500.0, 1.0), (5.0, 900.0)])
def test_device_and_host_are_told_apart_whichever_is_slower(host: float, device: float) -> None:
    gpu = FakeGpu()
    (cost,) = clock.costs(gpu, [lambda: gpu.launch(host, device)])
    assert (cost.device_us, cost.host_us) == pytest.approx((device, host))
    assert (cost.device_noise_us, cost.host_noise_us) == pytest.approx((0, 0), abs=1e-6)


def test_the_device_is_held_for_longer_where_the_host_needs_more() -> None:
    gpu = FakeGpu()
    found = clock.block(gpu, lambda: gpu.launch(1000.0, 10.0), 1, lead_us=100.0)
    assert found == clock.Block(pytest.approx(10.0), 1000.0, True)
    assert gpu.held == 100.0 + 2000.0


def test_what_waits_for_the_device_itself_cannot_be_hidden() -> None:
    gpu = FakeGpu()

    def synchronises() -> None:
        gpu.launch(5.0, 10.0)
        gpu.wait()

    assert not clock.block(gpu, synchronises, 2, lead_us=100.0).hidden


def test_what_comes_before_a_block_is_not_timed() -> None:
    gpu = FakeGpu()
    found = clock.block(gpu, lambda: gpu.launch(1.0, 2.0), 1, 50.0, before=lambda: gpu.launch(300.0, 4000.0))
    assert (found.device_us, found.host_us) == pytest.approx((2.0, 1.0))


def test_a_drift_falls_on_all_alike() -> None:
    """Every second round runs backwards: with costs that grow all the time the same code costs the same."""
    gpu, grown = FakeGpu(), [10.0]

    def drifting() -> None:
        gpu.launch(1.0, grown[0])
        grown[0] += 0.01

    one, other = clock.costs(gpu, [drifting, drifting])
    assert one.device_us == pytest.approx(other.device_us, rel=0.02)
    assert [*clock.in_turns(3, range(2))] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("each_us", "least", "turns"), [(1.0, 2, 9), (0.3e6, 2, 7), (1.9e6, 2, 2), (9e6, 2, 2), (9e6, 1, 1), (0.0, 1, 9)]
)
def test_what_takes_long_is_timed_in_fewer_rounds(each_us: float, least: int, turns: int) -> None:
    gpu = FakeGpu()
    assert [gpu.launch(each_us, 0.0) or turn for turn in clock.patient(gpu, 9, least)] == [*range(turns)]


def test_a_budget_is_spent_by_the_clock() -> None:
    gpu = FakeGpu()
    gpu.launch(7.0, 0.0)
    budget = clock.Budget(gpu, 100.0)
    run = budget.limited(lambda: gpu.launch(60.0, 0.0))
    assert budget.left_us == 100.0
    run(), run()  # the second began in time
    assert budget.left_us == -20.0
    with pytest.raises(clock.OutOfTime):
        run()
    assert gpu.now_us() == 127.0


def test_noise_is_measured() -> None:
    gpu = FakeGpu(noise=0.1)
    (cost,) = clock.costs(gpu, [lambda: gpu.launch(300.0, 200.0)])
    assert cost.device_us == pytest.approx(200.0, rel=0.15) and 0.5 < cost.device_noise_us < 60.0
    assert cost.host_us == pytest.approx(300.0, rel=0.15) and 0.5 < cost.host_noise_us < 90.0


def test_no_garbage_is_collected_in_between() -> None:
    seen: list[bool] = []
    gpu = FakeGpu()
    clock.costs(gpu, [lambda: (seen.append(gc.isenabled()), gpu.launch(1.0, 1.0))])
    assert not any(seen) and gc.isenabled()


def test_costs_add_up() -> None:
    assert Cost(1, 2, 3, 4) * 2 + Cost(1, 1, 1, 1) == Cost(3, 5, 7, 9)
