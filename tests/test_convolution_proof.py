"""What is folded is proved within the derived bound, and by how much more than PyTorch it errs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_cases import CASES, PROVED
from convolution_models import (
    Block,
    bn,
    conv,
    drawn,
    residual,
    swapped_with,
    without_activation,
    written,
)
from torch import Tensor, nn

import normswap
from normswap import reference
from normswap.proof import product_bounds
from normswap.proof.product_bounds import times_pytorchs


@pytest.mark.parametrize("name", PROVED)
def test_what_is_folded_is_proved(name: str) -> None:
    case = CASES[name]
    model = drawn(case.make).to(case.dtype)
    fast = swapped_with(model)
    for inputs in ((torch.randn(case.shape).to(case.dtype),), ()):
        rows = normswap.validate(fast, *inputs, mode="forward").rows
        assert rows and all(row["status"] == "wiring" and row["error_share"] <= 1.0 for row in rows), rows


def planted(monkeypatch: pytest.MonkeyPatch, change: Any, forward: Any = residual) -> Any:
    """What is swapped while the fold is wrong, and the report of its proof."""
    model, x = drawn(lambda: written(forward)(conv(), bn())), torch.randn(2, 6, 9, 8)
    fast = swapped_with(model)
    real = reference.fold_scale_batch_norm
    monkeypatch.setattr(reference, "fold_scale_batch_norm", lambda *a: change(*real(*a), *a))
    with pytest.warns(UserWarning, match="do not match"):
        return normswap.validate(fast, x, mode="forward", on_mismatch="rollback")


FAULTS: dict[str, Any] = {
    "bias forgotten": lambda weight, bias, *given: (weight, bias - given[6]),
    "mean off": lambda weight, bias, *given: (weight, bias + given[5] * given[3]),
    "channels swapped": lambda weight, bias, *given: (weight.flip(1), bias),
    "off": lambda weight, bias, *given: (weight * 1.03, bias),
}
SMALL_FAULTS: dict[str, Any] = {
    "variance forgotten": lambda weight, bias, *given: (weight * (given[4] + 1e-5).sqrt()[:, None, None, None], bias),
    "a little off": lambda weight, bias, *given: (weight * 1.0001, bias),
    "rounded to bfloat16": lambda weight, bias, *given: (weight.to(torch.bfloat16).float(), bias),
}


@pytest.mark.parametrize("name", (*FAULTS, *SMALL_FAULTS))
def test_planted_faults_are_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = planted(monkeypatch, {**FAULTS, **SMALL_FAULTS}[name])
    assert [row["status"] for row in report.rows] == ["failed"] and report.swapped == ()


@pytest.mark.parametrize("name", FAULTS)
def test_faults_planted_under_autocast_are_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = planted(monkeypatch, FAULTS[name], without_activation)
    assert [row["status"] for row in report.rows] == ["failed"] and report.swapped == ()


def test_more_than_pytorchs_error_is_told_of() -> None:
    """Inputs of a large mean, weights of a channel that cancel it: what rounds a weight counts, PyTorch's own not."""
    model = drawn(lambda: Block(nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4))).to(torch.bfloat16)
    with torch.no_grad():
        model.conv.weight.copy_(torch.tensor([5.0, 3, -8, 7, 4, -11]).view(1, 6, 1, 1) / 64)
        for statistic in (model.bn.running_mean, model.bn.bias):
            statistic.zero_()
    x = (torch.randn(2, 6, 9, 8) * 0.01 + 3.0).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="times PyTorch's own"):
        report = normswap.validate(swapped_with(model), x, mode="forward")
    assert report.rows[0]["status"] == "failed"


def in_tf32(t: Tensor, cut: bool) -> Tensor:
    """``t``, of float32, with the ten bits of mantissa that TF32 has: rounded, or cut off."""
    bits = t.float().view(torch.int32) + (0 if cut else 0x1000)
    return (bits & ~0x1FFF).view(torch.float32).double()


@pytest.mark.parametrize("cut", (False, True))
def test_the_bound_of_a_convolution_in_tf32(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_bounds, "takes_tf32", lambda x: True)
    model, x = drawn(lambda: Block(conv(40), nn.BatchNorm2d(40))), torch.randn(16, 6, 9, 8).relu() + 1
    wide = copy.deepcopy(model).double()
    z = wide.conv(x.double())
    limit = product_bounds.folded_error(wide.conv, wide.bn, x.double(), z, torch.float32, x)
    c, b = model.conv, model.bn
    weight, bias = reference.fold_scale_batch_norm(
        c.weight, c.bias, None, b.running_mean, b.running_var, b.weight, b.bias, b.eps
    )
    for gain, within in ((1.0, True), (1.02, False)):
        given = in_tf32(x, cut), in_tf32(weight * gain, cut), bias.double()
        error = (F.conv2d(*given, padding=1) - wide.bn(z)).abs()
        assert bool((error <= limit).all()) is within, float((error / limit).max())


def test_times_pytorchs() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    one, three = torch.tensor([1.0, -1, 1, 1]), torch.tensor([3.0, 3, -3, float("nan")])
    assert times_pytorchs(three, one, expected) == pytest.approx(3.0)
    assert times_pytorchs(one, three, expected) == times_pytorchs(expected, expected, expected) == 1.0


@pytest.mark.parametrize("precision", ("tf32", "ieee"))
def test_who_rounds_to_tf32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=precision))
    x = torch.ones(1)
    assert not product_bounds.takes_tf32(x)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert product_bounds.takes_tf32(x) == (precision == "tf32") and not product_bounds.takes_tf32(x.half())
