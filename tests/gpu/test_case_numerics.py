"""Values that break a careless norm on the GPU: offsets, constants, overflow, denormals, NaN, zero weights, any eps."""

from __future__ import annotations

import re

import pytest
import torch
from models import L1
from norm_models import (
    DTYPES,
    NORMS,
    assert_alike,
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

import normswap

DEVICE = "cuda"
ROWS = [kind for kind in NORMS if kind != "linear_scale_batch_norm"]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (100.0, 1000.0))
@pytest.mark.parametrize("std", (1.0, 1e-3))
@pytest.mark.case("offset-mean")
def test_offset_values_are_proved(kind: str, dtype: torch.dtype, mean: float, std: float) -> None:
    """By the proof alone: at a mean of 1000 and a spread of 1e-3 PyTorch itself is far from the truth."""
    model, x = made(kind, DEVICE)
    swapped_copy(model.to(dtype), (x * std + mean).to(dtype))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ("zero", "constant", "large", "tiny"))
@pytest.mark.case("constant-rows", "zero-rows", "large-values")
def test_extreme_values_are_proved(kind: str, values: str, dtype: torch.dtype) -> None:
    """The proof holds ours to PyTorch's NaN and Inf, and the finite rest to float64."""
    model, x = made(kind, DEVICE)
    model, x = model.to(dtype), VALUES[values](x).to(dtype)
    if values == "large" and kind not in ("rms_norm", "group_norm", "l1_norm") and dtype is not torch.float16:
        # The variance overflows float32: neither ours nor PyTorch's is the truth, and the site may be put back.
        swapped = normswap.optimize(model, x, on_mismatch="rollback", on_empty="ignore", min_speedup=None)
        assert torch.equal(swapped(x).isfinite(), model(x).isfinite())
        return
    swapped_copy(model, x)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.case("denormals")
def test_denormals(kind: str) -> None:
    """Where a unit in the last place is a thousandth of the value; the gradient of the L1 norm overflows."""
    model, x = made(kind, DEVICE)
    swapped, x = swapped_copy(model, x), VALUES["denormal"](x)
    assert_alike(model, swapped, x, None if kind == "l1_norm" else cotangent_of(model, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (0.0, 3.0, -1000.0))
@pytest.mark.parametrize("kind", ("layer_norm", "group_norm"))
@pytest.mark.case("constant-rows")
def test_constant_rows_give_exactly_the_bias(kind: str, value: float, dtype: torch.dtype) -> None:
    model, x = made(kind, DEVICE, dtype)
    swapped, x = swapped_copy(model, x), torch.full_like(x, value)
    bias = model.bias.view(-1, 1, 1) if kind == "group_norm" else model.bias
    assert torch.equal(swapped(x), bias.expand(x.shape))


@by_kind
@pytest.mark.case("zero-rows")
def test_one_row_of_zeros(kind: str) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model, x)
    assert_alike(model, swapped, with_row(x, 2, 0.0), cotangent_of(model, x))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.case("non-finite-rows")
def test_what_is_not_finite_stays_in_its_row(kind: str, value: float, dtype: torch.dtype) -> None:
    model, x = made(kind, DEVICE, dtype)
    swapped, broken, others = swapped_copy(model, x), x.clone(), [0, 1, 3]
    broken[2].reshape(-1)[1] = value
    ours, whole = results(swapped, broken)["output"], results(swapped, x)["output"]
    assert torch.equal(ours[others], whole[others]) and not ours[2].isfinite().all()


@pytest.mark.case("zero-weights")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "l1_norm"])
def test_zero_weights_have_finite_gradients(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    with torch.no_grad():
        norm_in(model).weight.zero_()
    assert_swaps_alike(model.train(training), x)
    found = results(swapped_copy(model, x), x, cotangent_of(model, x))
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.case("zero-weights", "scale-values")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("scale", (0.0, -2.0))
def test_a_scale_of_zero_or_below(scale: float, training: bool) -> None:
    model, x = made("linear_scale_batch_norm", DEVICE)
    with torch.no_grad():
        model.scale.fill_(scale)
    assert_swaps_alike(model.train(training), x)


@pytest.mark.case("eps-range")
@pytest.mark.parametrize("eps", (0.0, 1e-12, 1e-3, 1e3))
@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "l1_norm"])
def test_eps(kind: str, eps: float) -> None:
    model, x = made(kind, DEVICE)
    norm_in(model).eps = eps
    try:
        model(x)
    except ValueError as error:  # an older PyTorch refuses an eps of 0 in eval too
        with pytest.raises(ValueError, match=re.escape(str(error))):
            swapped_copy(model, x)
        return
    assert_swaps_alike(model, x)


@pytest.mark.case("eps-range")
def test_eps_of_batch_norm_in_training() -> None:
    """0 is for PyTorch to refuse."""
    model, x = made("linear_scale_batch_norm", DEVICE)
    swapped = swapped_copy(model.train(), x)
    for eps in (0.0, 1e-12, 1e-3, 1e3):
        model.bn.eps = swapped.bn.eps = eps
        assert_same_outcome(model, swapped, x)


@pytest.mark.case("zero-rows", "non-finite-rows")
@pytest.mark.parametrize("dtype", DTYPES)
def test_l1_norm_has_nan_exactly_where_pytorch_has(dtype: torch.dtype) -> None:
    x = torch.randn(6, 12, device=DEVICE, dtype=dtype)
    x[0], x[2, 3], x[3, 4] = 0.0, float("nan"), float("inf")
    swapped = swapped_copy(L1(), torch.randn(6, 12, device=DEVICE, dtype=dtype))
    assert torch.equal(swapped(x).isnan(), L1()(x).isnan())
    assert swapped(x).isnan().any(1).tolist() == [True, False, True, True, False, False]
