"""Regions: what is found in a forward, and that it computes what it did, whatever is done to the model."""

from __future__ import annotations

import pytest
import torch
from models import randomised
from region_changes import CHANGED
from region_checks import Case, check, written
from region_look_alikes import LOOK_ALIKES
from region_models import FOUND
from region_views import VIEWS

import normswap
from normswap import ops

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED, **{f"view: {name}": case for name, case in VIEWS.items()}}


@pytest.mark.case("region", "region-look-alikes", "region-changed-later")
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode)


@pytest.mark.parametrize("case", [case for case in (*FOUND.values(), *VIEWS.values()) if case.found])
def test_every_region_is_proved(case: Case) -> None:
    model = randomised(written(case.forward)).eval()
    inputs = tuple(torch.randn(shape) for shape in case.shapes)
    report = normswap.report(normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise"))
    assert "" in report.swapped


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layer_norm_over_channels_keeps_the_strides(
    monkeypatch: pytest.MonkeyPatch, memory_format: torch.memory_format
) -> None:
    model = randomised(written(FOUND["layer_norm_2d"].forward)).eval()
    x = torch.randn(2, 8, 3, 5).to(memory_format=memory_format)
    fast = normswap.optimize(model, (x, x), min_speedup=None)
    served: list[torch.Size] = []
    real = ops.layer_norm
    monkeypatch.setattr(ops, "layer_norm", lambda x, *rest, **named: served.append(x.shape) or real(x, *rest, **named))
    with torch.no_grad():
        ours, theirs = fast(x, x), model(x, x)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    # The norm that is a child is ours too: of a contiguous image it is called by the region's own statements.
    assert served == [torch.Size((2, 3, 5, 8))]
