"""What is timed for the choice, by a GPU that is not there: which calls, of what form, how often, forward or both."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from fake_gpu import LAUNCH, WORK, FakeGpu, X, blocks, norms, optimized, running
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import progress
from normswap.plans import Match, Site, Swap
from normswap.timing import candidates, decision
from normswap.timing import model as whole_model
from normswap.timing.clock import BUDGET_US, Budget, Cost
from normswap.timing.decision import cover
from normswap.timing.model import Waiting

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a copy.*")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys of what was timed, in order."""
    seen: list[Any] = []
    original = decision.time_use

    def timed(use: candidates.Use, budget: Any) -> Any:
        seen.append(use.key)
        return original(use, budget)

    monkeypatch.setattr(decision, "time_use", timed)
    return seen


def test_sites_that_are_alike_are_timed_once_and_others_not(keys: list[Any]) -> None:
    same = [nn.LayerNorm(8) for _ in range(4)]
    model = nn.Sequential(*same, nn.LayerNorm(8, bias=False), nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)).eval()
    report = normswap.report(optimized(model, torch.randn(2, 8), norms((10.0, 5.0))))
    assert len(keys) == 4 and all(row["ours_device_us"] == pytest.approx(5.0) for row in report.rows)


def different_from(norm: nn.LayerNorm) -> dict[str, nn.LayerNorm]:
    """Norms whose calls may take another time, by what differs."""
    return {
        "eps": nn.LayerNorm(8, eps=1e-3),
        "no bias": nn.LayerNorm(8, bias=False),
        "dtype": nn.LayerNorm(8, dtype=torch.bfloat16),
        "weight frozen": nn.LayerNorm(8).requires_grad_(False),
        "mode": nn.LayerNorm(8).train(not norm.training),
    }


@pytest.mark.parametrize("what", different_from(nn.LayerNorm(8)))
def test_what_tells_modules_apart(what: str) -> None:
    norm = nn.LayerNorm(8)
    assert candidates.looks(norm) == candidates.looks(randomised(nn.LayerNorm(8)))
    assert candidates.looks(norm) != candidates.looks(different_from(norm)[what])


def test_what_tells_calls_apart() -> None:
    x = torch.randn(4, 8)
    call = candidates.Call.of(x)
    assert call == candidates.Call.of(torch.randn(4, 8)) and hash(call) == hash(candidates.Call.of(x))
    others = [
        torch.randn(5, 8),
        torch.randn(8, 4).t(),
        x.half(),
        torch.randn(4, 8, requires_grad=True),
        torch.randn(33)[1:].view(4, 8),
        x.to("meta"),
    ]
    assert all(candidates.Call.of(other) != call for other in others)
    assert candidates.Call.of((x, x)) != call and candidates.Call.of((x, 2)) != call
    with torch.autocast("cpu", torch.bfloat16):
        assert candidates.Call.of(x) != call


def test_a_frozen_norm_is_timed_apart_from_one_that_learns(keys: list[Any]) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)).train()
    model[2].requires_grad_(False)
    optimized(model, torch.randn(2, 8), norms((10.0, 5.0)))
    assert len(keys) == 3  # the first one's input requires no gradient either


class Other(Tensor):
    """A tensor that may do anything."""


def test_calls_that_cannot_be_made_again_are_not_recorded() -> None:
    x = torch.randn(2, 3)
    for given in ((), x.int(), x[:0], (x, bytearray()), x.as_subclass(Other), (x, x.as_subclass(Other))):
        assert candidates.Call.of(given) is None


def test_of_a_sequential_only_the_swapped_children_are_timed(keys: list[Any]) -> None:
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 6), nn.BatchNorm1d(6)
    model = randomised(nn.Sequential(*layers)).eval()
    report = normswap.report(optimized(model, torch.randn(4, 8), norms((30.0, 10.0))))
    (row,) = report.rows
    assert row["kind"] == "region" and row["calls"] == 2 == len(keys)
    assert not any("Softplus" in repr(key) for key in keys)


def test_calls_are_counted_by_form_and_weigh() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.work(x)
            return self.norm(x) + self.norm(x) + self.norm(x[:1])

    sizes: list[int] = []

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, nn.LayerNorm):
            return 1.0, (4.0 if sizes[-1] > 8 else 40.0) if swapped else 10.0
        return (1.0, WORK) if isinstance(module, nn.Linear) else (0.0, 0.0)

    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, args: sizes.append(args[0].numel()))
    try:
        (row,) = normswap.report(optimized(Thrice().eval(), torch.randn(5, 8), costs)).rows
    finally:
        handle.remove()
    assert row["calls"] == 3 and row["eager_device_us"] == pytest.approx(10.0)
    assert row["ours_device_us"] == pytest.approx((2 * 4 + 40) / 3) and not row["swapped"]


def test_a_site_counts_as_often_as_it_is_called() -> None:
    """Of two that exclude each other the one that saves more in one run is kept, not the one that saves more a call."""
    gpu, made = FakeGpu(), torch.device("cpu")

    def use(name: str, calls: int, before: float, after: float) -> candidates.Use:
        functions = (lambda: gpu.launch(1.0, before)), (lambda: gpu.launch(1.0, after))
        return candidates.Use(name, calls, made, lambda: contextlib.nullcontext(functions))

    found = [
        candidates.Candidate("often", (use("a", 50, 10.0, 5.0),)),
        candidates.Candidate("rare", (use("b", 1, 200.0, 100.0),), frozenset(["often"])),
    ]
    with running(gpu, lambda module, swapped: (0.0, 0.0)):
        timed = decision.time_candidates(found, Budget(gpu, 1e9))
    assert cover(timed, Waiting(1.0, 0.0), 1.0) == {"often"}
    assert timed[0].calls == 50 and timed[0].original.device_us == pytest.approx(500.0)


def timed_inputs(model: nn.Module, x: Tensor) -> list[tuple[Any, ...]]:
    """(call, the inputs made for it) of what is timed in ``model``."""
    found = []
    original = candidates.Call.made

    def made(call: candidates.Call) -> tuple[Any, ...]:
        found.append((call, original(call)))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates.Call, "made", made)
        optimized(model.eval(), x, norms((10.0, 5.0)), validate="off")
    return [(call, *inputs) for call, inputs in found]


def test_made_inputs_have_the_shapes_strides_and_dtypes_of_the_captured_ones() -> None:
    wide, buffer = torch.randn(6, 16), torch.randn(49)
    for x in (wide[:, ::2], wide[:, 8:], wide[:1, :8].expand(5, 8), buffer[1:].view(6, 8), torch.randn(8, 4).t()):
        for dtype in (torch.float32, torch.bfloat16):
            given = x.to(dtype) if dtype is torch.bfloat16 else x
            ((_, made),) = timed_inputs(nn.Sequential(nn.LayerNorm(x.shape[1])).to(dtype), given)
            assert made.shape == given.shape and made.dtype == dtype
            assert made.stride() == given.clone().stride()  # the model is run on clones of its inputs
            assert made.float().std() > 0.1


def test_strides_inside_a_model_and_empty_inputs() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x.t()[:0])
            return self.norm(x.t()) + self.norm(x[:1, :1].expand(3, 8)).sum()

    found = timed_inputs(Inner(), torch.randn(8, 5))
    assert [(tuple(made.shape), made.stride()) for _, made in found] == [((5, 8), (1, 5)), ((3, 8), (0, 0))]


def test_a_region_of_several_inputs_and_outputs_is_timed_with_its_backward() -> None:
    """As statements are: residual add and norm, of which both the sum and the norm are used."""
    weight = torch.randn(8, requires_grad=True)
    seen: list[Any] = []

    def region(packed: Any) -> tuple[Tensor, Tensor]:
        (x, y), scale, mask = packed
        seen.append((x.requires_grad, y.requires_grad, scale, mask.dtype))
        total = x + y * scale
        return total, torch.nn.functional.layer_norm(total, (8,), weight)

    recorder = candidates.Recorder()
    learns, fixed, mask = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8), torch.ones(4, dtype=torch.bool)
    for _ in range(3):
        recorder.add(((learns, fixed), 2.0, mask))
    (use,) = recorder.uses("key", lambda: (candidates.Code(region, [weight]),) * 2, gradients=True)
    assert use.calls == 3 and use.device == torch.device("cpu")
    with use.functions() as (original, ours):
        first, second = original(), ours()
    assert [g.shape for g in first] == [(4, 8), (8,)] and all(map(torch.equal, first, second))
    assert seen[-1] == (True, False, 2.0, torch.bool) and weight.grad is None
    (forward,) = recorder.uses("key", lambda: (candidates.Code(region, [weight]),) * 2, gradients=False)
    assert forward.key != use.key
    with forward.functions() as both:
        assert isinstance(both[0](), tuple) and seen[-1][0] is False


@pytest.mark.parametrize(
    ("training", "learns", "grad", "expected"),
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_backward_in_training_with_gradients_only(training: bool, learns: bool, grad: bool, expected: bool) -> None:
    model = blocks(1).train(training).requires_grad_(learns)
    seen = []
    costs = norms((30.0, 10.0))

    def watched(module: nn.Module, swapped: bool) -> tuple[float, float]:
        seen.append(torch.is_grad_enabled())
        return costs(module, swapped)

    with torch.set_grad_enabled(grad):
        report = normswap.report(optimized(model, X, watched, validate="off"))
    assert set(seen) == {expected} and report.times["training"] == expected
    told = "forward and backward" if expected else "forward"
    assert f"the model on these inputs, {told}: " in str(report)


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        report = normswap.report(optimized(blocks(), X, norms((30.0, 10.0))))
    assert len(report.swapped) == 3 and not report.times["training"]


def test_no_gradient_is_left_and_no_buffer_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 8)
    state = torch.get_rng_state()
    swapped = optimized(model, x, norms((30.0, 10.0)), inplace=True)
    assert swapped is model and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_autocast_of_the_call_is_that_of_the_timing() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Sequential(nn.LayerNorm(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.norm(x)

    seen = []

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, nn.LayerNorm):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return 1.0, 1.0

    optimized(Casts().eval(), torch.randn(4, 8), costs, validate="off")
    assert set(seen) == {(True, torch.bfloat16)}


def test_out_of_memory_keeps_the_site_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: Any, functions: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(decision, "costs", fail)
    report = normswap.report(optimized(blocks(1), X, norms((20.0, 10.0))))
    assert report.swapped == ("1",) and report.rows[0]["gain"] is None
    assert "could not be timed" in str(report) and report.rows[0]["detail"] == "not timed: out of memory or time"


def test_out_of_memory_of_the_whole_model_keeps_all_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: Any, run: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(decision.whole_model, "waiting", fail)
    report = normswap.report(optimized(blocks(), X, norms((10.0, 20.0))))
    assert len(report.swapped) == 3 and report.times is None
    assert {row["detail"] for row in report.rows} == {"not timed: out of memory or time"}


@pytest.mark.parametrize(
    ("run_s", "timed", "least"),
    [*((one, True, 1.0) for one in (0.01, 0.1, 0.4, 1.0, 2.0)), (5.0, False, 1.0), (1000.0, False, 2.0)],
)
def test_a_slow_model_does_not_take_for_ever(
    run_s: float, timed: bool, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster sites are kept and the slower put back where there is time to see it; else all are, and it is said."""

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        if isinstance(module, nn.Linear):
            return LAUNCH, run_s * 1e6 / 6
        if not isinstance(module, nn.LayerNorm):
            return 0.0, 0.0
        return 10.0, (0.5 if swapped == (module.eps == 1e-5) else 1.0) * run_s * 1e6 / 6

    model, gpu, took = blocks(), FakeGpu(), []
    model[1].eps = 1e-3
    real = decision.decide_sites

    def decided(*given: Any) -> Any:
        gpu.wait()
        begun = gpu.now_us()
        found = real(*given)
        gpu.wait()
        took.append(gpu.now_us() - begun)
        return found

    monkeypatch.setattr("normswap.timing.decide_sites", decided)
    report = normswap.report(optimized(model, X, costs, gpu, min_speedup=least))
    assert took[0] <= BUDGET_US + 3e6 * run_s
    assert report.swapped == (("3", "5") if timed else ("1", "3", "5"))
    assert (report.times is not None) == timed
    assert ("out of memory or time" in str(report.rows)) != timed


def test_candidates_that_are_not_reached_in_time_are_kept_if_the_model_gains() -> None:
    """The host waits for each call of the slow one, which takes its part of the time."""

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        slow = isinstance(module, nn.LayerNorm) and module.normalized_shape == (8,)
        return LAUNCH, (3e6 if swapped else 6e6) if slow else 1.0

    layers = [nn.LayerNorm(8), nn.Linear(8, 6), nn.LayerNorm(6)]
    report = normswap.report(optimized(randomised(nn.Sequential(*layers)).eval(), X, costs))
    assert report.swapped == ("0", "2") and report.rows[0]["detail"] == "not timed: out of memory or time"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_only(capsys: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    optimized(blocks(), X, norms((10.0, 5.0)))
    told = capsys.readouterr().err
    assert ("normswap: proof" in told) == ("normswap: timing" in told) == terminal


def test_a_run_that_waits_for_its_device_is_not_held_again_and_again() -> None:
    gpu = FakeGpu()

    def run() -> None:
        gpu.launch(100.0, 20_000.0)
        gpu.wait()

    waits = whole_model.waiting(gpu, run)
    assert waits.device_us == pytest.approx(20_000.0, rel=0.02) and waits.host_us == pytest.approx(20_100.0)
    assert gpu.held < 400_000.0


def part(calls: int = 1, before: float = 30.0, after: float = 10.0, note: str = "") -> candidates.Candidate:
    costs = Cost(calls * before, 0.0), Cost(calls * after, 0.0)
    return candidates.Candidate("a", (), frozenset(), calls, *costs, note)


@pytest.mark.parametrize(
    ("parts", "note", "expected"),
    (
        ((part(), part(3, 10.0, 10.0)), "", (4, 15.0, 1.5, "")),
        ((part(), part(0, note="memory")), "", (1, 30.0, 3.0, "memory")),
        ((part(0, note="memory"), part(note="other")), "told", (1, 30.0, 3.0, "told")),
        ((part(0),), "", (0, 0.0, None, "")),
        ((part(1, 0.0, 0.0),), "", (1, 0.0, 1.0, "")),
    ),
)
def test_the_parts_of_a_site_are_told_as_one(parts: Any, note: str, expected: tuple[Any, ...]) -> None:
    row = decision.row(parts, Waiting(1.0, 0.0), note)
    assert (row["calls"], row["eager_device_us"], row["gain"], row["note"]) == expected


@pytest.mark.parametrize(
    ("kept", "left"),
    (
        (("a[0]", "a[1]", "b"), (Match("region", {"regions": [1, 2]}), Match("layer_norm"))),
        (("a[1]", "b"), (Match("region", {"regions": [2]}), Match("layer_norm"))),
        (("b",), (None, Match("layer_norm"))),
        (("a[0]", "a[1]"), (Match("region", {"regions": [1, 2]}), None)),
    ),
)
def test_of_a_site_the_regions_that_gain_are_kept(kept: Any, left: tuple[Match | None, ...]) -> None:
    swaps = [Swap(Site("a", "A"), Match("region", {"regions": [1, 2]})), Swap(Site("b", "B"), Match("layer_norm"))]
    assert tuple(candidates.kept_of(swap, kept) for swap in swaps) == left
