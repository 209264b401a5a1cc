"""What optimize() keeps, by a GPU that is not there: real models, real recording, real timing, made-up costs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import WORK, Costs, FakeGpu, X, blocks, norms, optimized
from models import Every, randomised
from torch import Tensor, nn

import normswap
from normswap import rollback
from normswap.plans import Plan, Reason
from normswap.timing import decision
from normswap.timing.clock import Cost
from normswap.timing.model import Compared, Waiting, compare

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a copy.*")


# --- where the model waits ------------------------------------------------------------------------------------------


def test_a_model_that_waits_for_its_device_keeps_what_is_faster_there() -> None:
    report = normswap.report(optimized(blocks(), X, norms((30.0, 10.0), (10.0, 12.0))))
    assert len(report.swapped) == 3
    row = report.rows[0]
    assert (row["bound"], row["gain"], row["calls"]) == ("device", pytest.approx(3.0), 1)
    times = (row["eager_device_us"], row["ours_device_us"], row["eager_host_us"], row["ours_host_us"])
    assert times == pytest.approx((30.0, 10.0, 10.0, 12.0))
    assert report.times == {
        "before_ms": pytest.approx(1.29, rel=0.02),
        "after_ms": pytest.approx(1.23, rel=0.02),
        "bound": "device",
        "device_ms": pytest.approx(1.29),
        "host_ms": pytest.approx(0.045),
        "training": False,
    }
    text = str(report)
    assert "the model on these inputs, forward: 1.29 ms before, 1.23 ms after (waits for its device)" in text
    line = next(line for line in text.splitlines() if line.startswith("layer_norm"))
    assert line.split()[-5:] == ["30.0", "10.0", "10.0", "12.0", "3.00x"]
    assert json.loads(report.to_json())["rows"][0]["gain"] == pytest.approx(3.0)


def test_a_model_that_waits_for_its_host_puts_back_what_costs_it_more() -> None:
    report = normswap.report(optimized(blocks(), X, norms((3.0, 1.0), (10.0, 12.0), linear=1.0)))
    assert not report.swapped and {row["bound"] for row in report.rows} == {"host"}
    assert report.times["before_ms"] == report.times["after_ms"] == pytest.approx(0.045, rel=0.1)
    why = "not faster here: device 3.0 -> 1.0 us a call, host 10.0 -> 12.0; cure:"
    assert f"put back: 1, 3, 5: {why}" in str(report)


def test_a_model_that_waits_for_its_host_keeps_what_changes_nothing_there() -> None:
    """Calls timed one after the other, the host not hidden, take as long as before here: nothing would be kept."""
    report = normswap.report(optimized(blocks(), X, norms((3.0, 1.0), (10.0, 10.0), linear=1.0)))
    assert len(report.swapped) == 3 and {row["gain"] for row in report.rows} == {1.0}
    assert "as fast as before, up to the noise, and kept: 3 of 3" in str(report)


def test_the_same_costs_give_another_choice_where_the_device_has_more_to_do() -> None:
    costs = ((30.0, 10.0), (10.0, 20.0))
    kept = [normswap.report(optimized(blocks(), X, norms(*costs, linear=linear))).swapped for linear in (0.0, WORK)]
    assert [len(names) for names in kept] == [3, 3]  # 30 us of the device hide 20 of the host
    kept = [normswap.report(optimized(blocks(), X, norms((8.0, 4.0), (10.0, 20.0), w))).swapped for w in (0.0, WORK)]
    assert [len(names) for names in kept] == [0, 3]


# --- what is kept and what is put back ------------------------------------------------------------------------------


def test_what_is_slower_is_put_back_and_the_rest_kept() -> None:
    model, x = randomised(Every()).eval(), torch.randn(8, 6, 5)

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, (Every, nn.Dropout)):
            return 0.0, 0.0
        return 1.0, (11.0 if isinstance(module, nn.LayerNorm) else 5.0) if swapped else 10.0

    swapped = optimized(model, x, costs)
    assert type(swapped.layer) is nn.LayerNorm
    report = normswap.report(swapped)
    assert report.swapped == ("group", "projection", "l1", "rms")
    (row,) = (row for row in report.rows if row["name"] == "layer")
    assert row["status"] == "slower" and not row["swapped"] and row["error_share"] > 0
    assert "put back: layer: not faster here: device 10.0 -> 11.0 us" in str(report)
    assert report.swapped == tuple(s.site.name for s in report.plan.swaps)
    assert [(r.site.name, r.refusal.reason) for r in report.plan.refused] == [("layer", Reason.SLOWER)]
    again = normswap.apply(model, Plan.from_json(report.plan.to_json()))
    assert normswap.report(again).swapped == report.swapped
    assert "left alone: layer: not faster here" in str(normswap.report(again))


def test_a_plan_says_on_which_gpu_its_choices_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "gpu_of", lambda model: "NVIDIA H200")
    plan = normswap.report(optimized(blocks(), X, norms((30.0, 10.0), (10.0, 12.0)))).plan
    assert plan.gpu == Plan.from_json(plan.to_json()).gpu == "NVIDIA H200"
    assert normswap.report(normswap.optimize(blocks(), X)).plan.gpu == ""  # nothing could be timed


@pytest.mark.parametrize(("least", "kept"), [(1.0, True), (1.9, True), (2.0, True), (2.1, False), (1e-6, True)])
def test_min_speedup_is_the_least_gain_where_the_model_waits(least: float, kept: bool) -> None:
    swapped = optimized(blocks(), X, norms((30.0, 15.0), (10.0, 12.0)), min_speedup=least)
    assert bool(normswap.report(swapped).swapped) == kept


@pytest.mark.parametrize(("least", "kept"), [(1.0, 0), (0.41, 0), (0.4, 3)])
def test_a_min_speedup_below_one_allows_a_loss(least: float, kept: int) -> None:
    swapped = optimized(blocks(), X, norms((40.0, 100.0)), min_speedup=least)
    assert len(normswap.report(swapped).swapped) == kept


def test_a_gain_of_exactly_one_is_kept() -> None:
    assert len(normswap.report(optimized(blocks(), X, norms((20.0, 20.0)))).swapped) == 3


def test_min_speedup_none_times_nothing() -> None:
    gpu = FakeGpu()
    report = normswap.report(optimized(blocks(), X, norms((10.0, 100.0)), gpu, min_speedup=None))
    assert len(report.swapped) == 3 and gpu.held == 0.0 and report.times is None
    assert all("gain" not in row for row in report.rows)


@pytest.mark.parametrize(
    "least", [0, -1.0, "2", float("nan"), float("inf"), -float("inf"), True, [1.0], torch.tensor([1.0, 2.0])]
)
def test_min_speedup_is_checked(least: Any) -> None:
    with pytest.raises(ValueError, match="min_speedup must be a number above 0, or None"):
        normswap.optimize(nn.LayerNorm(4), min_speedup=least)


def test_nothing_is_timed_on_a_cpu() -> None:
    assert decision.machine_for([torch.device("cpu")]) is None and decision.machine_for([]) is None
    report = normswap.report(normswap.optimize(blocks(), X))
    assert report.times is None and all("gain" not in row for row in report.rows)


def test_when_all_are_slower_it_says_so() -> None:
    costs = norms((10.0, 30.0))
    with pytest.warns(UserWarning, match=r"of 3 sites that were recognised 3 put back, as they are not faster here;"):
        swapped = optimized(blocks(), X, costs, on_empty="warn")
    assert type(swapped[1]) is nn.LayerNorm
    with pytest.raises(normswap.NothingSwappedError):
        optimized(blocks(), X, costs, on_empty="raise")
    with pytest.warns(UserWarning, match="nothing was swapped .the model holds no norm that is known"):
        normswap.optimize(nn.Linear(2, 2), torch.randn(1, 2))


# --- never slower than the original ---------------------------------------------------------------------------------


class Together(nn.Module):
    """Two norms; the second costs the device more when the first is swapped, as when it finds the L2 cold."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.first, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.work(x)))


def interfering(model_slows: float, swapped_first: Callable[[], bool]) -> Costs:
    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, Together):
            return 1.0, model_slows if swapped_first() else 0.0
        if isinstance(module, nn.Linear):
            return 1.0, WORK
        if isinstance(module, nn.LayerNorm):
            return 1.0, 10.0 if swapped else 30.0
        return (1.0 if swapped else 3.0), 30.0

    return costs


def test_what_makes_the_whole_model_slower_is_put_back() -> None:
    """Each candidate gains by itself, and the model loses."""
    model = randomised(Together()).eval()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: seen.append(m) if isinstance(m, Together) else None
    )
    try:
        costs = interfering(100.0, lambda: normswap.modules.site_match(seen[-1].first) is not None)
        report = normswap.report(optimized(model, X, costs))
    finally:
        handle.remove()
    assert not report.swapped
    assert report.times["before_ms"] == report.times["after_ms"] == pytest.approx(0.46, rel=0.02)
    (row,) = (row for row in report.rows if row["name"] == "first")
    assert row["gain"] == pytest.approx(3.0) and row["reason"] == "not faster here"


def test_then_what_gains_on_the_device_alone_is_tried() -> None:
    """The second norm, kept as it costs nothing, is what slows the model."""
    model = randomised(Together()).eval()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda m, args: seen.append(m) if isinstance(m, Together) else None
    )
    try:
        costs = interfering(100.0, lambda: normswap.modules.site_match(seen[-1].second) is not None)
        report = normswap.report(optimized(model, X, costs))
    finally:
        handle.remove()
    assert report.swapped == ("first",)
    assert report.times["after_ms"] == pytest.approx(0.44, rel=0.02) and report.times["before_ms"] > 0.455


def test_a_noisy_clock_excuses_three_percent_at_most() -> None:
    assert not Compared((100.0, 102.9), noise=0.5).slower(1) and Compared((100.0, 103.1), noise=0.5).slower(1)
    assert not Compared((100.0, 100.9), noise=0.0).slower(1) and Compared((100.0, 101.1), noise=0.0).slower(1)
    assert not Compared((100.0, 150.0), noise=0.0).slower(1, allowed=2.0)


class TwoRegions(nn.Module):
    """A sum before a norm, and an activation behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.norm1, self.norm2 = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.work(x)
        return h + torch.relu(self.norm2(self.norm1(h)))


def test_of_two_regions_the_one_that_loses_goes_and_its_norm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_use(use: Any, _: Any) -> tuple[Cost, Cost]:
        key = repr(use.key)
        before, after = (40.0, 60.0) if "activation" in key else (50.0, 20.0) if "sum" in key else (30.0, 25.0)
        return Cost(before, 10.0), Cost(after, 10.0)

    monkeypatch.setattr(decision, "time_use", time_use)
    model = randomised(TwoRegions()).eval()
    swapped = optimized(model, X, norms((30.0, 30.0)))  # where each region runs its statements
    report = normswap.report(swapped)
    found = {swap.site.name: swap.match.attributes.get("regions", ()) for swap in report.plan.swaps}
    assert {name: len(regions) for name, regions in found.items()} == {"": 1, "norm2": 0}
    assert found[""][0]["norm"] == "norm1"
    (row,) = (row for row in report.rows if row["kind"] == "region")
    assert (row["eager_device_us"], row["ours_device_us"]) == (50.0, 20.0)
    assert row["detail"].endswith("1 of 2 regions are kept")
    again = normswap.apply(model, Plan.from_json(report.plan.to_json()))
    assert json.loads(normswap.report(again).plan.to_json())["swaps"] == json.loads(report.plan.to_json())["swaps"]
    for one in (swapped, again, normswap.revert(swapped)):
        torch.testing.assert_close(one(X), model(X))


def test_a_busy_host_does_not_hide_what_the_device_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model waits for was measured while others had the host: it seems to wait for that, where ours loses."""
    monkeypatch.setattr(decision.whole_model, "waiting", lambda machine, run: Waiting(1290.0, 2600.0))
    report = normswap.report(optimized(blocks(), X, norms((60.0, 10.0), (10.0, 15.0))))
    assert len(report.swapped) == 3 and report.times["after_ms"] < 0.9 * report.times["before_ms"]


def test_where_regions_slow_the_model_their_norms_are_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_use(use: Any, _: Any) -> tuple[Cost, Cost]:
        before, after = (50.0, 20.0) if {"sum", "activation"} & {*repr(use.key).split("'")} else (30.0, 10.0)
        return Cost(before, 10.0), Cost(after, 10.0)

    monkeypatch.setattr(decision, "time_use", time_use)

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, TwoRegions):
            return 1.0, 100.0 if swapped else 0.0
        return norms((30.0, 10.0))(module, swapped)

    report = normswap.report(optimized(randomised(TwoRegions()).eval(), X, costs))
    assert report.swapped == ("norm1", "norm2") and report.times["after_ms"] < report.times["before_ms"]


def test_what_gains_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, real = [], decision.whole_model.compare
    monkeypatch.setattr(decision.whole_model, "compare", lambda *given: timed.append(1) or real(*given))
    assert len(normswap.report(optimized(blocks(), X, norms((30.0, 10.0)))).swapped) == 3 and timed == [1]


@pytest.mark.parametrize("disturbed", [0, 1])
def test_of_two_times_that_of_the_less_disturbed_machine_is_believed(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing seems to gain at first: because others have the host, or because nothing does."""
    quiet = Compared((1000.0, 900.0), 0.0) if disturbed == 0 else Compared((1000.0, 1100.0), 0.0)
    loud = Compared((2000.0, 2200.0), 0.0) if disturbed == 0 else Compared((2000.0, 1900.0), 0.0)
    times = [loud, quiet] if disturbed == 0 else [quiet, loud]
    monkeypatch.setattr(decision.whole_model, "compare", lambda machine, ways: times.pop(0))
    report = normswap.report(optimized(blocks(), X, norms((30.0, 10.0))))
    assert not times and len(report.swapped) == (3 if disturbed == 0 else 0)
    assert report.times["before_ms"] == 1.0


def test_ways_are_held_against_the_original_turn_by_turn() -> None:
    """Others have the host every now and then, for as long as several turns take."""
    gpu = FakeGpu()

    def run(share: float) -> Callable[[], None]:
        return lambda: gpu.launch(share * (50.0 + 40.0 * (gpu.host // 50_000 % 3)), 1.0)

    found = compare(gpu, [(contextlib.nullcontext, run(1.0)), (contextlib.nullcontext, run(1.1))])
    assert found.us[1] / found.us[0] == pytest.approx(1.1, rel=0.01)


# --- equal runs give equal plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "host", "linear"),
    [
        ((30.0, 10.0), (10.0, 12.0), WORK),
        ((30.0, 30.0), (10.0, 10.0), WORK),
        ((3.0, 1.0), (20.0, 20.0), 1.0),
        ((3.0, 1.0), (20.0, 30.0), 1.0),
        ((30.0, 36.0), (10.0, 10.0), WORK),
    ],
)
def test_noise_does_not_change_the_plan(device: tuple[float, float], host: tuple[float, float], linear: float) -> None:
    plans = set()
    for seed in range(10):
        gpu = FakeGpu(noise=0.02, seed=seed)
        plans.add(normswap.report(optimized(blocks(), X, norms(device, host, linear), gpu)).plan.to_json())
    assert len(plans) == 1


# --- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, None])
def test_what_is_to_be_compiled_is_not_timed(told: bool | None) -> None:
    model = blocks()
    if told is None:
        model.compile(backend="eager")
    gpu = FakeGpu()
    report = normswap.report(optimized(model, X, norms((10.0, 50.0)), gpu, for_compile=told, validate="off"))
    assert len(report.swapped) == 3 and report.times is None and gpu.held == 0.0


def test_what_is_compiled_is_timed_where_that_is_asked_for() -> None:
    report = normswap.report(optimized(blocks(), X, norms((10.0, 50.0)), for_compile=False))
    assert not report.swapped and report.times is not None
