"""Regions: what is found in a forward, and that it computes what it did, whatever is done to the model."""

from __future__ import annotations

import pytest
import torch
from models import randomised
from region_checks import Case, check, written
from region_look_alikes import CHANGED, LOOK_ALIKES
from region_models import FOUND

import normswap

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED}


@pytest.mark.case("region", "region-look-alikes", "region-changed-later")
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode)


@pytest.mark.parametrize("name", [name for name, case in FOUND.items() if case.found])
def test_every_region_is_proved(name: str) -> None:
    case = FOUND[name]
    model = randomised(written(case.forward)).eval()
    inputs = tuple(torch.randn(shape) for shape in case.shapes)
    report = normswap.report(normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise"))
    assert "" in report.swapped
