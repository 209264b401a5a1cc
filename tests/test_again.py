"""A model that is optimized again, in parts or compiled; what the report says of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import Every, randomised

import normswap
from normswap.plans import Plan, Reason


class Each(Every):
    """Every site by itself: no norm stands beside something that could be computed with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms(self.l1(self.projection(self.layer(self.group(x)).flatten(1))))


X = (8, 6, 5)
SITES = ("group", "layer", "projection", "l1", "rms")


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("inputs", [torch.randn(X), None])
def test_again_keeps_the_report_and_the_plan(inplace: bool, inputs: torch.Tensor | None) -> None:
    first = normswap.optimize(randomised(Each()).eval(), torch.randn(X))
    known = normswap.report(first)
    second = normswap.optimize(first, inputs, inplace=inplace, on_empty="raise")
    report = normswap.report(second)
    assert report.swapped == SITES and report.plan == known.plan
    assert {row["status"] for row in report.rows} == {"wiring"} and len(report.rows) == 5
    assert "nothing is swapped" not in str(report) and "5 of 5 sites swapped" in str(report)
    replayed = normswap.apply(randomised(Each()).eval(), Plan.from_json(report.plan.to_json()))
    assert normswap.report(replayed).swapped == SITES


def test_in_two_steps_the_second_knows_of_the_first() -> None:
    model = randomised(Each()).eval()
    first = normswap.optimize(model, torch.randn(X), include=["layer", "rms"])
    assert normswap.report(first).swapped == ("layer", "rms")
    second = normswap.optimize(first, torch.randn(X), include=["group", "l1"])
    report = normswap.report(second)
    assert set(report.swapped) == {"layer", "rms", "group", "l1"}
    assert [(r.site.name, r.refusal.reason) for r in report.plan.refused] == [("projection", Reason.EXCLUDED)]
    assert {swap.site.name for swap in report.plan.swaps} == {"layer", "rms", "group", "l1"}


def test_what_was_put_back_in_between_is_not_in_the_report() -> None:
    model = normswap.optimize(randomised(Each()).eval(), torch.randn(X))
    normswap.revert(model.layer)
    again = normswap.optimize(model, torch.randn(X), exclude="layer")
    report = normswap.report(again)
    assert set(report.swapped) == {*SITES} - {"layer"}
    assert [row["code"] for row in report.rows if row["name"] == "layer"] == [Reason.EXCLUDED.name]


def test_a_swapped_model_without_a_report_is_counted_too() -> None:
    model = normswap.optimize(randomised(Each()).eval(), torch.randn(X))
    again = normswap.optimize(copy.deepcopy(model), torch.randn(X))
    report = normswap.report(again)
    assert set(report.swapped) == {*SITES} and {row["status"] for row in report.rows} == {"unchecked"}


# --- models that are compiled -------------------------------------------------------------------------------------


def failing(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled while proving")


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("where", ["model", "child", "method"])
def test_a_compiled_model_is_proved_without_compiling(where: str) -> None:
    model: Any = randomised(Each()).eval()
    if where == "model":
        model = torch.compile(model, backend=failing)
    elif where == "child":
        model.layer = torch.compile(model.layer, backend=failing)
    else:
        model.compile(backend=failing)
    fast = normswap.optimize(model, torch.randn(X), inplace=True)
    report = normswap.report(fast)
    assert len(report.swapped) == 5 and {row["inputs"] for row in report.rows} == {"captured"}
    assert report.model is not None and report.model["passed"]
    assert len(normswap.validate(fast, torch.randn(X)).swapped) == 5


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_gives_a_compiled_copy_that_runs() -> None:
    model = randomised(Each()).eval()
    x = torch.randn(X)
    fast = normswap.optimize(torch.compile(model, backend="eager"), x)
    torch.testing.assert_close(fast(x), model(x))
    assert len(normswap.report(fast).swapped) == 5
    report = normswap.validate(torch.compile(fast, backend="eager"), x)
    assert len(report.swapped) == 5
