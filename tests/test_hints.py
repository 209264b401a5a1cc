"""What a person is told: cures that cure, warnings that are true, reports that fit on a line."""

from __future__ import annotations

import types
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Every, randomised
from torch import Tensor, nn

import normswap
from normswap.plans import Reason

SILENT = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("inputs", "cure"),
    [
        ({"x": torch.randn(2, 6)}, "pass a dict as example_kwargs"),
        ([torch.randn(2, 6)], r"pass tuple\(example_inputs\), or \(example_inputs,\) for one argument that is a list"),
        (3, r"put a single argument of another kind into a tuple: \(argument,\)"),
    ],
)
def test_inputs_of_another_kind(inputs: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=cure):
        normswap.optimize(nn.LayerNorm(6), inputs)


def hooked_as_by_accelerate(model: nn.Module) -> nn.Module:
    """What accelerate.hooks.add_hook_to_module leaves behind."""
    model._hf_hook, old = object(), model.forward
    model._old_forward = old
    model.forward = types.MethodType(lambda self, *args, **kwargs: old(*args, **kwargs), model)  # type: ignore[method-assign]
    return model


def refused(model: nn.Module, inputs: Any = None) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (row,) = normswap.report(normswap.optimize(model.eval(), inputs, inplace=True)).rows
    return row


def test_hooks_of_accelerate_have_their_own_cure() -> None:
    row = refused(nn.Sequential(hooked_as_by_accelerate(nn.LayerNorm(6))))
    assert row["code"] == Reason.DISPATCHED.name and "accelerate" in row["reason"]
    assert "optimize() before accelerate" in row["cure"]


def test_a_registered_class_without_eps() -> None:
    @normswap.register_norm("layer_norm")
    class NoEps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (6,), self.weight)

    assert "give register_norm its eps, the name of an attribute or a number" in refused(NoEps())["reason"]


def test_norms_of_no_kind_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.LocalResponseNorm(2))
    told = r"holds norms of no kind that is swapped, or not as they are here: BatchNorm2d \(2\), LocalResponseNorm"
    with pytest.warns(UserWarning, match=told):
        normswap.optimize(model.eval(), torch.randn(2, 3, 5, 5))


def test_no_norms_at_all() -> None:
    with pytest.warns(UserWarning, match=r"nothing was swapped \(the model holds no norm"):
        normswap.optimize(nn.Linear(3, 3).eval())


def test_refused_sites_are_counted() -> None:
    model = nn.Sequential(hooked_as_by_accelerate(nn.LayerNorm(6))).eval()
    with pytest.warns(UserWarning, match=r"of 1 sites that were recognised 1 left alone"):
        normswap.optimize(model, inplace=True)


def test_a_model_without_values_is_told_why_it_was_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(6)).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(2, 6)))
    assert "no values (meta or lazy)" in report.rows[0]["detail"] and "no values (meta or lazy)" in str(report)
    assert "no proof was asked for" not in str(report)


# --- warnings -----------------------------------------------------------------------------------------------------


@SILENT
def test_a_model_just_built_is_copied_in_silence() -> None:
    normswap.optimize(randomised(Every()).train(), torch.randn(8, 6, 5))


@SILENT
def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    normswap.optimize(randomised(Every()).train(), torch.randn(8, 6, 5))
    assert optimizer.param_groups


def test_an_optimizer_of_this_model_is_warned_of() -> None:
    model = randomised(Every()).train()
    optimizer = torch.optim.Adam([{"params": [model.layer.weight]}])
    with pytest.warns(UserWarning, match="returns a copy.*Adam"):
        normswap.optimize(model, torch.randn(8, 6, 5))
    assert optimizer.param_groups


@SILENT
def test_a_scripted_child_makes_no_noise() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    normswap.optimize(nn.Sequential(scripted, nn.LayerNorm(6)).eval(), torch.randn(2, 6))


# --- the report in a notebook -------------------------------------------------------------------------------------


def test_a_report_is_one_line_and_a_table() -> None:
    model = nn.Sequential(nn.LayerNorm(6), hooked_as_by_accelerate(nn.LayerNorm(6))).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(2, 6), inplace=True))
    assert repr(report).startswith("<normswap.Report: 1 of 2 sites swapped on cpu, float32, eval mode")
    assert "\n" not in repr(report) and len(repr(report)) < 200
    page = report._repr_html_()
    assert page.count("<table") == 1 and "layer_norm" in page and "left alone: 1" in page


@pytest.mark.parametrize("status", ["slower", "declined", "identity"])
def test_a_page_of_what_was_put_back(status: str) -> None:
    report = normswap.report(normswap.optimize(nn.Sequential(nn.LayerNorm(6)).eval(), torch.randn(2, 6)))
    page = replace(report, rows=({**report.rows[0], "status": status, "swapped": False},))._repr_html_()
    assert "put back: 1" in page


def test_the_page_has_bars_where_something_was_timed() -> None:
    report = normswap.report(normswap.optimize(nn.Sequential(nn.LayerNorm(6)).eval(), torch.randn(2, 6)))
    assert "<svg" not in report._repr_html_()
    times = {"calls": 2, "bound": "device", "eager_device_us": 30.0, "ours_device_us": 10.0, "gain": 3.0}
    page = replace(report, rows=({**report.rows[0], **times, "eager_host_us": 1.0, "ours_host_us": 1.0},))._repr_html_()
    assert page.count("<rect") == 2 and "60.0 us" in page and "20.0 us" in page
    assert "layer_norm, before" in page and 'width="320.0"' in page and 'width="106.7"' in page


def test_the_page_escapes_what_a_model_says() -> None:
    model = nn.Module()
    model.add_module("<b>norm", hooked_as_by_accelerate(nn.LayerNorm(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page = normswap.report(normswap.optimize(model.eval(), inplace=True))._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;norm" in page


# --- what is and is not proved ------------------------------------------------------------------------------------


def test_outputs_that_are_nowhere_finite_prove_nothing() -> None:
    model, x = nn.Sequential(nn.LayerNorm(6)).eval(), torch.full((3, 6), float("nan"))
    with pytest.warns(UserWarning, match="nowhere finite"):
        report = normswap.report(normswap.optimize(model, x))
    assert report.rows[0]["status"] == "unchecked" and "nowhere finite" in report.rows[0]["detail"]
    assert report.model is not None and not report.model["passed"]


def test_one_call_with_values_is_enough() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(torch.full_like(x, float("nan")))
            return self.norm(x)

    report = normswap.report(normswap.optimize(Twice().eval(), torch.randn(3, 6)))
    assert report.rows[0]["status"] == "wiring" and report.model is not None and report.model["passed"]


def test_a_child_that_bears_the_name_of_a_setting_is_reported() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gn, self.silu = nn.GroupNorm(2, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.gn(x))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Norms()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.silu(self.inner(x))

    report = normswap.report(normswap.optimize(Around().eval(), torch.randn(3, 6)))
    assert {"inner", "inner.silu"} <= {*report.swapped}
