"""Values that break a careless norm: offsets, constants, overflow, denormals, NaN, zero weights, any eps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from models import L1, Projection, randomised
from norm_models import (
    NORMS,
    assert_alike,
    assert_same_error,
    assert_same_outcome,
    assert_swaps_alike,
    by_kind,
    cotangent_of,
    made,
    norm_in,
    results,
    swapped_copy,
)
from norm_tables import VALUES, with_row
from torch import Tensor, nn

import normswap
from normswap import ops


@by_kind
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("offset-mean", "constant-rows", "zero-rows", "large-values", "denormals")
def test_values(kind: str, values: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    x = VALUES[values](x)
    assert_alike(model, swapped, x, cotangent_of(model, x))


@pytest.mark.parametrize("kind", ("layer_norm", "group_norm", "rms_norm"))
@pytest.mark.parametrize("mean", (100.0, 1000.0))
@pytest.mark.parametrize("std", (1.0, 1e-3))
@pytest.mark.case("offset-mean")
def test_offset_values_are_proved(kind: str, mean: float, std: float) -> None:
    model, x = made(kind)
    assert_swaps_alike(model, x * std + mean)


@pytest.mark.case("constant-rows")
@pytest.mark.parametrize("value", (0.0, 3.0, -1000.0))
def test_constant_rows_give_the_bias(value: float) -> None:
    model, x = made("layer_norm")
    assert torch.equal(swapped_copy(model, x)(torch.full_like(x, value)), model.bias.expand(x.shape))


@by_kind
@pytest.mark.case("zero-rows")
def test_one_row_of_zeros(kind: str) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x)
    assert_alike(model, swapped, with_row(x, 2, 0.0), cotangent_of(model, x))


@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "linear_scale_batch_norm"])
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.case("non-finite-rows")
def test_what_is_not_finite_stays_in_its_row(kind: str, value: float) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x)
    broken = x.clone()
    broken[2].reshape(-1)[1] = value
    assert_alike(model, swapped, broken, cotangent_of(model, x))
    ours, whole = results(swapped, broken)["output"], results(swapped, x)["output"]
    others = [0, 1, 3]
    assert torch.equal(ours[others], whole[others]) and not ours[2].isfinite().all()


@pytest.mark.case("zero-weights")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "l1_norm"])
def test_zero_weights_have_finite_gradients(kind: str, training: bool) -> None:
    model, x = made(kind)
    with torch.no_grad():
        norm_in(model).weight.zero_()
    assert_swaps_alike(model.train(training), x)
    found = results(swapped_copy(model, x), x, cotangent_of(model, x))
    assert all(tensor.isfinite().all() for tensor in found.values())
    (learned,) = (found[f"gradient of {name}"] for name, p in model.named_parameters() if p is norm_in(model).weight)
    assert learned.abs().max() > 0


@pytest.mark.case("zero-weights", "scale-values")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("scale", (0.0, -2.0))
def test_a_scale_of_zero_or_below(scale: float, training: bool) -> None:
    model, x = made("linear_scale_batch_norm")
    with torch.no_grad():
        model.scale.fill_(scale)
    assert_swaps_alike(model.train(training), x)


@pytest.mark.case("eps-range")
def test_eps_of_batch_norm_in_training() -> None:
    """0 is for PyTorch to refuse."""
    model, x = made("linear_scale_batch_norm")
    swapped = swapped_copy(model.train(), x)
    for eps in (0.0, 1e-12, 1e-3, 1e3):
        model.bn.eps = swapped.bn.eps = eps
        assert_same_outcome(model, swapped, x)


@pytest.mark.case("eps-range")
@pytest.mark.parametrize("eps", (0.0, 1e-12, 1e-3, 1e3))
@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "l1_norm"])
def test_eps(kind: str, eps: float) -> None:
    model, x = made(kind)
    norm_in(model).eps = eps
    if kind == "linear_scale_batch_norm" and eps == 0.0 and not takes(model, x):  # by the version of PyTorch
        assert_same_error(lambda: normswap.optimize(model, x), lambda: model(x))
    else:
        assert_swaps_alike(model, x)


def takes(model: nn.Module, x: Tensor) -> bool:
    """Whether a copy of ``model`` takes ``x``, which PyTorch may refuse as a value that is wrong."""
    try:
        copy.deepcopy(model)(x)
    except ValueError:
        return False
    return True


@pytest.mark.case("rms-eps-none")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("size", (1.0, 1e-4))
def test_rms_norm_without_eps(dtype: torch.dtype, size: float) -> None:
    model, x = randomised(nn.RMSNorm(12)).to(dtype), (torch.randn(5, 12) * size).to(dtype)
    assert_swaps_alike(model, x)
    assert torch.equal(ops.rms_norm(x, (12,), model.weight), F.rms_norm(x, (12,), model.weight))


@pytest.mark.case("zero-rows", "non-finite-rows")
def test_l1_norm_has_nan_exactly_where_pytorch_has() -> None:
    x = torch.randn(6, 12)
    x[0], x[1], x[2, 3], x[3, 4] = 0.0, 1e-45, float("nan"), float("inf")
    x[4] = torch.finfo(torch.float32).max
    swapped = swapped_copy(L1(), torch.randn(6, 12))
    assert_alike(L1(), swapped, x, torch.randn(6, 12))
    assert swapped(x).isnan().any(1).tolist() == [True, False, True, True, False, False]


@pytest.mark.case("large-values")
def test_statistics_of_a_batch_that_overflows() -> None:
    model = randomised(Projection(7, 6)).train()
    swapped = swapped_copy(model, torch.randn(9, 7))
    assert_alike(model, swapped, torch.randn(9, 7) * 1e30, torch.randn(9, 6))
