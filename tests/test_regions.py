"""Regions: what is found in a forward, and that it computes what it did, whatever is done to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_region_models import LinearParts
from models import randomised
from region_checks import CHANNELS, Case, Parts, check, swap, written
from region_models import FOUND
from region_tables import TABLE
from region_views import VIEWS

import normswap
from normswap import ops


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


def first_of_groups(self: Any, x: Any, y: Any) -> Any:
    return F.relu(y + self.gn(x))


def first_of_a_batch(self: Any, x: Any, y: Any) -> Any:
    return torch.add(y, self.bn(x))


def first_of_a_linear(self: Any, x: Any, y: Any) -> Any:
    return F.relu(y + self.bn(self.fc(x)))


@pytest.mark.parametrize("forward", (first_of_groups, first_of_a_batch, first_of_a_linear))
def test_a_sum_is_laid_out_after_its_first_operand(forward: Any) -> None:
    of_rows = forward is first_of_a_linear
    model = randomised(written(forward, LinearParts if of_rows else Parts)).eval()
    fast = swap(model)
    assert type(fast) is not type(model)
    shape = (16, model.fc.in_features) if of_rows else (2, CHANNELS, 3, 5)
    channels = model.fc.out_features if of_rows else CHANNELS
    orders = ((0, 1), (1, 0)) if of_rows else ((0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 0, 1))
    with torch.no_grad():
        for order in orders:
            for other in orders:
                x, y = laid_out(torch.randn(shape), order), laid_out(torch.randn(shape[0], channels, *shape[2:]), other)
                ours, theirs = fast(x, y), model(x, y)
                assert ours.stride() == theirs.stride(), (order, other)
                torch.testing.assert_close(ours, theirs)


def laid_out(x: Any, order: tuple[int, ...]) -> Any:
    """``x`` with its dims in memory in that order."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
