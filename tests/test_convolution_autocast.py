"""Convolution -> BatchNorm under autocast, on a CPU: folded before the weights are rounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_cases import CASES, PROVED
from convolution_checks import TOLERANCE, outcome
from convolution_models import (
    Block,
    bn,
    conv,
    drawn,
    residual,
    swapped_with,
    written,
)
from torch import Tensor, nn

import normswap
from normswap import native, ops, reference
from normswap.activation import Activation
from normswap.ops import dispatch

LOWERED = [name for name in PROVED if CASES[name].dtype is torch.float32]
SUMMED_IN_FLOAT32 = [name for name in LOWERED if not name.startswith("transposed")]
"""A transposed convolution in 16 bits may be rounded tap by tap on a CPU."""
by_lowered = pytest.mark.parametrize("lowered", (torch.bfloat16, torch.float16))


@by_lowered
@pytest.mark.parametrize("name", LOWERED)
def test_autocast_folds_in_float32_and_rounds_once(name: str, lowered: torch.dtype, folds: list[str]) -> None:
    case = CASES[name]
    model = drawn(case.make)
    fast = swapped_with(model)
    wide = torch.randn(case.shape).contiguous(memory_format=case.layout)
    for x in (wide, wide.to(lowered)):
        folds.clear()
        with torch.autocast("cpu", lowered):
            ours, theirs = outcome(fast, x)[0], outcome(model, x)[0]
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        added = x.dtype is not lowered and any("residual" in found for found in case.found)
        assert added or folds == ["folded"] * case.folds
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[lowered], atol=10 * TOLERANCE[lowered])


def with_small_shifts(model: nn.Module) -> nn.Module:
    """Of six channels, large shifts that are rounded may happen to err by more than all that PyTorch rounds."""
    with torch.no_grad():
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            shifts = (module.bias, module.running_mean) if is_norm else (getattr(module, "bias", None),)
            for shift in shifts:
                if shift is not None:
                    shift.mul_(0.1)
    return model


@by_lowered
@pytest.mark.parametrize("name", SUMMED_IN_FLOAT32)
def test_what_is_folded_under_autocast_is_proved(name: str, lowered: torch.dtype) -> None:
    case = CASES[name]
    model, x = with_small_shifts(drawn(case.make)), torch.randn(case.shape)
    for inputs in ((x,), (x.to(lowered),), ()):
        with torch.autocast("cpu", lowered):
            rows = normswap.validate(swapped_with(model), *inputs, mode="forward").rows
        assert rows and all(row["status"] == "wiring" and row["error_share"] <= 1.0 for row in rows), rows


@by_lowered
def test_under_autocast_a_weight_is_not_rounded_before_it_is_folded(lowered: torch.dtype) -> None:
    given = torch.randn(5, 3, 2, 2), torch.randn(5), torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)
    x = torch.eye(12, dtype=lowered).view(12, 3, 2, 2)  # what it gives is the weight
    how = (1, 1), (0, 0), (1, 1), 1
    with torch.autocast("cpu", lowered):
        ours = ops.convolution_batch_norm_eval(x, given[0], None, *how, *given[2:], 1e-3)
    wide = reference.fold_scale_batch_norm(given[0], None, None, *given[2:], 1e-3)
    weight, shift = (t.to(lowered).double() for t in wide)
    expected = (weight.view(5, 12).t() + shift).to(lowered)
    assert torch.equal(ours.view(12, 5), expected)


def test_what_autocast_casts_otherwise_runs_the_statements(folds: list[str]) -> None:
    model = drawn(lambda: Block(conv(), bn()))
    for made, dtype in ((copy.deepcopy(model).double(), torch.float64), (model, torch.float64)):
        fast, x = swapped_with(made), torch.randn(2, 6, 9, 8).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = outcome(fast, x), outcome(made, x)
        assert folds == []
        assert ours == theirs if isinstance(theirs, str) else torch.equal(ours[0], theirs[0])
    fast, x = swapped_with(model), torch.randn(2, 6, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = outcome(fast, x, learning=True), outcome(model, x, learning=True)
    assert folds == [] and torch.equal(ours[0], theirs[0])


def test_under_autocast_ours_scales_the_sums_of_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    low = torch.bfloat16
    model = drawn(lambda: written(residual)(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)))
    x, added = (torch.randn(2, 8, 9, 8).to(low) for _ in range(2))
    seen: list[Any] = []

    def op(input: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        *how, groups, mean, var, gain, offset, eps, behind, code, _, _ = rest
        assert not torch.is_autocast_enabled("cpu") and weight.dtype is bias.dtype is input.dtype is low
        assert (groups, code) == (1, 1) and how == [1, 1, 1, 1, 1, 1]
        seen.append(input)
        z = F.conv2d(input.float(), weight.float(), bias.float(), padding=1)
        return (F.batch_norm(z, mean, var, gain, offset, False, 0.0, eps) + behind).relu().to(input.dtype)

    native.load()  # or it would put its own op in the place of this one when it is
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {"convolution_batch_norm_eval": op})
    c, b = model.conv, model.bn
    norm = b.running_mean, b.running_var, b.weight, b.bias, b.eps
    how = c.stride, c.padding, c.dilation, c.groups
    for given in (x, x.float()):
        with torch.no_grad(), torch.autocast("cpu", low):
            ours = ops.convolution_batch_norm_eval(
                given, c.weight, c.bias, *how, *norm, Activation("relu"), residual=added, folding="scaled"
            )
            assert torch.is_autocast_enabled("cpu")
            theirs = F.relu(b(c(given)) + added).float()
        assert ours.dtype is low
        torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.05)
    assert len(seen) == 2


@by_lowered
def test_autocast_of_a_model_in_16_bits(lowered: torch.dtype, folds: list[str]) -> None:
    for of_norm in (torch.float32, lowered):
        model = drawn(lambda: Block(conv(), bn())).half()
        model.bn.to(of_norm)
        fast, x = swapped_with(model), torch.randn(2, 6, 9, 8).half()
        folds.clear()
        with torch.autocast("cpu", lowered):
            ours, theirs = outcome(fast, x)[0], outcome(model, x)[0]
        assert folds == ["folded"] and ours.dtype is theirs.dtype is lowered
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)
