"""Norms written out inside a larger forward: found, computed as they were, and proved."""

from __future__ import annotations

from typing import Any

import pytest
import region_expressions
import torch
from models import randomised
from region_checks import Case, assert_same, check, outcome, regions_in, swap, written

import normswap
from normswap.kinds import KINDS
from normswap.regions.expression import Expression

TABLE: dict[str, Case] = {**region_expressions.FOUND, **region_expressions.ALIKE}


@pytest.mark.case("region", "region-look-alikes")
@pytest.mark.parametrize("name", TABLE)
def test_what_is_found_computes_what_it_did(name: str) -> None:
    check(TABLE[name], "eval")


def test_every_kind_has_its_row() -> None:
    assert {*region_expressions.SPELLINGS} == {*region_expressions.LOOK_ALIKES} == {*KINDS}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("name", region_expressions.FOUND)
def test_every_expression_is_proved_with_its_gradients(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bool] = []
    real = Expression.__call__
    monkeypatch.setattr(Expression, "__call__", lambda *given: _noted(served, real(*given)))
    case = region_expressions.FOUND[name]
    torch.manual_seed(0)
    model = randomised(written(case.forward)).eval().to(dtype)
    inputs = tuple(torch.randn(shape).to(dtype) for shape in case.shapes)
    report = normswap.report(normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise"))
    assert "" in report.swapped and served and all(served)


def _noted(served: list[bool], out: Any) -> Any:
    served.append(out is not None)
    return out


@pytest.mark.parametrize("kind", region_expressions.SPELLINGS)
def test_an_expression_is_itself_under_autocast_and_for_whole_numbers(kind: str) -> None:
    forward = next(case for name, case in region_expressions.FOUND.items() if name.startswith(f"{kind} "))
    model = randomised(written(forward.forward))
    inputs = tuple(torch.randn(shape) for shape in forward.shapes)
    swapped = swap(model)
    assert regions_in(model) == (kind,)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(swapped, model, inputs, False)
        assert_same(swapped, model, tuple(t.bfloat16() for t in inputs), False)
    assert_same(swapped.double(), model.double(), tuple(t.double() for t in inputs), False)
    whole = tuple((t * 9).long() for t in inputs)
    ours, theirs = outcome(swapped, whole, False), outcome(model, whole, False)
    assert (
        ours == theirs if isinstance(theirs, str) else torch.allclose(ours["output 0"], theirs["output 0"], atol=1e-6)
    )


@pytest.mark.parametrize("eps", (0.0, -1e-5))
def test_an_eps_that_pytorch_refuses_is_left_to_it(eps: float) -> None:
    assert KINDS["weight_standardization"].call(torch.randn(1, 6, 9), None, None, 0.1, eps) is None
