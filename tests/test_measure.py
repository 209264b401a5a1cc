"""Never slower: what is timed, on which inputs, what is kept, and that it leaves no trace. The timer is ours here."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from models import Every, randomised
from torch import Tensor, nn

import normswap
from normswap import measure
from normswap.plan import Plan, Reason

X = (8, 6, 5)


class FakeTimer:
    """Says that ours takes ``ours`` microseconds, the original 10; runs both once."""

    def __init__(self) -> None:
        self.ours: Callable[[], float] = lambda: 5.0
        self.timed: list[list[Any]] = []
        self.grad: list[bool] = []

    def __call__(self, functions: Sequence[Callable[[], object]]) -> list[float]:
        self.timed.append([function() for function in functions])
        self.grad.append(torch.is_grad_enabled())
        return [10.0, self.ours()]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> FakeTimer:
    fake = FakeTimer()
    monkeypatch.setattr(measure, "timer_for", lambda device: fake)
    return fake


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        yield


def test_nothing_is_timed_on_a_cpu() -> None:
    assert measure.timer_for(torch.device("cpu")) is None
    report = normswap.report(normswap.optimize(randomised(Every()).eval(), torch.randn(X)))
    assert all("gain" not in row for row in report.rows)


def test_what_is_faster_is_kept_and_told(timer: FakeTimer) -> None:
    swapped = normswap.optimize(randomised(Every()).eval(), torch.randn(X))
    report = normswap.report(swapped)
    assert len(report.swapped) == 5 == len(timer.timed)
    assert {(r["calls"], r["eager_us"], r["ours_us"], r["gain"]) for r in report.rows} == {(1, 10.0, 5.0, 2.0)}
    line = next(line for line in str(report).splitlines() if line.startswith("layer_norm"))
    assert line.split()[-3:] == ["10.0", "5.0", "2.00x"]
    assert "one run of the model: 5 calls of them, 50 us with PyTorch's, 25 us with ours" in str(report)
    assert json.loads(report.to_json())["rows"][0]["gain"] == 2.0


def test_what_is_slower_is_put_back_and_the_rest_kept(timer: FakeTimer) -> None:
    timer.ours = lambda: 11.0 if len(timer.timed) == 2 else 5.0
    model = randomised(Every()).eval()
    swapped = normswap.optimize(model, torch.randn(X))
    assert type(swapped.layer) is nn.LayerNorm
    report = normswap.report(swapped)
    assert report.swapped == ("group", "projection", "l1", "rms")
    (row,) = (row for row in report.rows if row["name"] == "layer")
    assert row["status"] == "slower" and not row["swapped"] and row["error_share"] > 0
    assert "put back: layer: not faster here (ours 11.0 us a call, PyTorch's 10.0)" in str(report)
    assert report.swapped == tuple(s.site.name for s in report.plan.swaps)
    assert [(r.site.name, r.refusal.reason) for r in report.plan.refused] == [("layer", Reason.SLOWER)]
    again = normswap.apply(model, Plan.from_json(report.plan.to_json()))
    assert normswap.report(again).swapped == report.swapped
    assert "left alone: layer: not faster here" in str(normswap.report(again))


@pytest.mark.parametrize(("least", "kept"), [(1.0, True), (1.9, True), (2.1, False), (None, True)])
def test_min_speedup(timer: FakeTimer, least: float | None, kept: bool) -> None:
    swapped = normswap.optimize(
        nn.Sequential(nn.LayerNorm(4)).eval(), torch.randn(2, 4), min_speedup=least, on_empty="ignore"
    )
    assert normswap.report(swapped).swapped == (("0",) if kept else ())
    assert len(timer.timed) == (least is not None)


@pytest.mark.parametrize("least", [0, -1.0, "2", float("nan")])
def test_min_speedup_is_checked(least: Any) -> None:
    with pytest.raises(ValueError, match="min_speedup must be a number above 0, or None"):
        normswap.optimize(nn.LayerNorm(4), min_speedup=least)


def test_when_all_are_slower_it_says_so(timer: FakeTimer) -> None:
    timer.ours = lambda: 20.0
    with pytest.warns(UserWarning, match="nothing was swapped"):
        swapped = normswap.optimize(nn.Sequential(nn.LayerNorm(4)).eval(), torch.randn(2, 4))
    assert type(swapped[0]) is nn.LayerNorm
    with pytest.raises(normswap.NothingSwappedError):
        normswap.optimize(nn.Sequential(nn.LayerNorm(4)).eval(), torch.randn(2, 4), on_empty="raise")


def test_sites_that_are_alike_are_timed_once_and_others_not(timer: FakeTimer) -> None:
    same = [nn.LayerNorm(8) for _ in range(4)]
    model = nn.Sequential(*same, nn.LayerNorm(8, bias=False), nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(2, 8)))
    assert len(timer.timed) == 4
    assert all(row["gain"] == 2.0 for row in report.rows)


def test_gradients_in_train_mode_only(timer: FakeTimer) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    normswap.optimize(model.eval(), torch.randn(2, 8))
    normswap.optimize(model.train(), torch.randn(2, 8))
    normswap.optimize(model.requires_grad_(False), torch.randn(2, 8))
    assert timer.grad == [False, True, False]
    assert len(timer.timed[1][0]) == 3  # gradients of input, weight and bias


def forms(model: nn.Module, x: Tensor) -> list[tuple[Any, ...]]:
    found = []
    original = measure._Form.made

    def made(form: measure._Form) -> Tensor:
        found.append((form, original(form)))
        return found[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure._Form, "made", made)
        normswap.optimize(model.eval(), x, validate="off")
    return found


@pytest.mark.usefixtures("timer")
def test_made_inputs_have_the_shapes_strides_and_dtypes_of_the_captured_ones() -> None:
    wide, buffer = torch.randn(6, 16), torch.randn(49)
    for x in (wide[:, ::2], wide[:, 8:], wide[:1, :8].expand(5, 8), buffer[1:].view(6, 8), torch.randn(8, 4).t()):
        for dtype in (torch.float32, torch.bfloat16):
            given = x.to(dtype) if dtype is torch.bfloat16 else x
            ((_, made),) = forms(nn.Sequential(nn.LayerNorm(x.shape[1])).to(dtype), given)
            assert made.shape == given.shape and made.dtype == dtype
            assert made.stride() == given.clone().stride()  # the model is run on clones of its inputs
            assert made.float().std() > 0.1


@pytest.mark.usefixtures("timer")
def test_strides_inside_a_model_and_empty_inputs() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(x.t()[:0])
            return self.norm(x.t()) + self.norm(x[:1, :1].expand(3, 8)).sum()

    found = forms(Inner(), torch.randn(8, 5))
    assert [(tuple(made.shape), made.stride()) for _, made in found] == [((5, 8), (1, 5)), ((3, 8), (0, 0))]


def test_calls_are_counted_by_form(timer: FakeTimer) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm(x) + self.norm(x[:1])

    timer.ours = lambda: 4.0 if len(timer.timed) == 1 else 16.0
    (row,) = normswap.report(normswap.optimize(Thrice().eval(), torch.randn(5, 8))).rows
    assert row["calls"] == 3 and row["eager_us"] == 10.0 and row["ours_us"] == pytest.approx((2 * 4 + 16) / 3)


def test_autocast_of_the_call_is_that_of_the_timing(timer: FakeTimer) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Sequential(nn.LayerNorm(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.norm(x)

    seen = []
    timer.ours = lambda: seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))) or 5.0
    normswap.optimize(Casts().eval(), torch.randn(4, 8))
    assert seen == [(True, torch.bfloat16)]


def test_out_of_memory_keeps_the_site_and_says_so(timer: FakeTimer) -> None:
    def fail() -> float:
        raise torch.OutOfMemoryError("no")

    timer.ours = fail
    report = normswap.report(normswap.optimize(nn.Sequential(nn.LayerNorm(8)).eval(), torch.randn(4, 8)))
    assert report.swapped == ("0",) and report.rows[0]["gain"] is None
    assert "could not be timed" in str(report) and report.rows[0]["detail"] == "not timed: out of memory"


def test_progress_on_a_terminal_and_after_a_second_only(
    timer: FakeTimer, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)).eval(), torch.randn(4, 8)
    for terminal, patience, told in ((False, 0.0, False), (True, 60.0, False), (True, -1.0, True)):
        with monkeypatch.context() as patched:
            patched.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
            patched.setattr(measure, "_PATIENCE_S", patience)
            normswap.optimize(model, x)
        shown = capsys.readouterr().err
        assert ("timing [###############...............] 1 of 2 sites" in shown) == told
        assert ("timing" in shown) == told
