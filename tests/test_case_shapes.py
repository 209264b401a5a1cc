"""Shapes and dtypes that a swapped norm must take, or refuse with PyTorch's own error."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Projection, randomised
from norm_models import (
    DTYPES,
    assert_close,
    assert_same_error,
    assert_same_outcome,
    assert_swaps_alike,
    by_kind,
    drawn,
    made,
    swapped_copy,
)
from norm_tables import (
    BAD_SHAPES,
    EMPTY,
    GROUPS,
    NORMALIZED_SHAPES,
    ONE_ELEMENT,
    ONE_VALUE,
    drawn_view,
    rows_of,
    shown,
)
from torch import nn

import normswap
from normswap import ops

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]


@pytest.mark.case("empty-batch")
@pytest.mark.parametrize(("make", "shape"), EMPTY, ids=shown)
def test_empty_batches(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()), torch.empty(shape))


@pytest.mark.case("empty-batch")
@pytest.mark.parametrize("training", (True, False))
def test_an_empty_batch_of_batch_norm(training: bool) -> None:
    model, x = made("linear_scale_batch_norm")
    swapped, empty = swapped_copy(model.train(training), x), torch.empty(0, 7)
    assert_same_outcome(model, swapped, empty)


@pytest.mark.case("one-element")
@pytest.mark.parametrize(("make", "shape"), ONE_ELEMENT, ids=shown)
def test_rows_of_one_element(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()), drawn(shape))


@pytest.mark.case("normalized-shape-rank")
@pytest.mark.parametrize(("make", "shape"), NORMALIZED_SHAPES, ids=shown)
def test_normalized_shapes(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()), drawn(shape))


@pytest.mark.case("ragged-rows", "long-row", "many-rows")
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *(case for size in (769, 1001, 65535) for case in rows_of(size, 3)),
        *rows_of(262_145, 1),
        *rows_of(4, 65_537),
        (lambda: nn.GroupNorm(2, 4), (2, 4, 1001)),
        (lambda: Projection(8, 6), (65_537, 8)),
    ],
    ids=shown,
)
def test_row_lengths_and_counts(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()), drawn(shape))


@pytest.mark.case("group-norm-ranks")
@pytest.mark.parametrize(("make", "shape"), GROUPS, ids=shown)
def test_group_norm_of_every_rank(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()), drawn(shape))


@pytest.mark.case("group-norm-wide-batch")
def test_group_norm_of_a_wide_batch() -> None:
    assert_swaps_alike(randomised(nn.GroupNorm(32, 640)), drawn((256, 640, 2, 2)))


@pytest.mark.case("one-value-per-channel", "bn-one-row")
@pytest.mark.parametrize(("make", "shape"), ONE_VALUE, ids=shown)
def test_one_value_per_channel_in_training_is_pytorchs_error(make: Make, shape: Shape) -> None:
    model = randomised(make()).train()
    swapped = swapped_copy(model, drawn((2, *shape[1:])))
    x = drawn(shape)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        swapped(x)
    assert_same_error(lambda: swapped(x), lambda: model(x))


@by_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("dtypes")
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    assert_swaps_alike(*made(kind, dtype=dtype))


@by_kind
@pytest.mark.case("float64")
def test_float64_stays_float64(kind: str) -> None:
    assert_swaps_alike(*made(kind, dtype=torch.float64))


@pytest.mark.parametrize("kind", ("layer_norm", "group_norm", "rms_norm"))
@pytest.mark.case("mixed-weights")
def test_float32_weights_of_a_bfloat16_input(kind: str) -> None:
    model, x = made(kind)
    assert_swaps_alike(model, x.bfloat16())


@pytest.mark.case("bad-shapes")
@pytest.mark.parametrize(("make", "shape"), BAD_SHAPES, ids=shown)
def test_bad_shapes_raise_what_pytorch_raises(make: Make, shape: Shape) -> None:
    model = randomised(make()).eval()
    swapped, x = swapped_copy(model, None), drawn(shape)
    assert_same_error(lambda: swapped(x), lambda: model(x))


@pytest.mark.case("bad-shapes")
def test_settings_that_do_not_fit_raise_what_pytorch_raises() -> None:
    x = drawn((2, 6, 4))
    for ours, theirs in (
        (lambda: ops.layer_norm(x, ()), lambda: F.layer_norm(x, ())),
        (lambda: ops.layer_norm(x, (4,), x[0, 0, :3]), lambda: F.layer_norm(x, (4,), x[0, 0, :3])),
        (lambda: ops.group_norm(x, 0), lambda: F.group_norm(x, 0)),
        (lambda: ops.group_norm(x, 4), lambda: F.group_norm(x, 4)),
        (lambda: ops.group_norm(x, 2, x[0, 0]), lambda: F.group_norm(x, 2, x[0, 0])),
        (lambda: ops.rms_norm(x, (5,)), lambda: F.rms_norm(x, (5,))),
        (lambda: ops.l1_norm(x, 3), lambda: x / x.abs().mean(3, keepdim=True)),
        (lambda: ops.layer_norm(x.long(), (4,)), lambda: F.layer_norm(x.long(), (4,))),
    ):
        assert_same_error(ours, theirs)


@pytest.mark.case("normalized-shape-rank", "strided-input", "output-strides")
@settings(max_examples=150, deadline=None)
@given(random=st.randoms(use_true_random=False), dtype=st.sampled_from((torch.float64, *DTYPES)))
def test_any_view_of_any_dtype(random: Random, dtype: torch.dtype) -> None:
    x = drawn_view(random, dtype=dtype)
    shape = x.shape[-random.randint(1, x.dim()) :]
    weight, bias = drawn(shape, dtype=dtype), drawn(shape, dtype=dtype)
    dim = random.randrange(-x.dim(), x.dim())
    for ours, theirs in (
        (ops.layer_norm(x, shape, weight, bias), F.layer_norm(x, shape, weight, bias)),
        (ops.rms_norm(x, shape, weight, 1e-6), F.rms_norm(x, shape, weight, 1e-6)),
        (ops.l1_norm(x, dim), x / torch.mean(torch.abs(x), dim=dim, keepdim=True)),
    ):
        assert ours.stride() == theirs.stride()
        assert_close(ours, theirs)


@pytest.mark.parametrize("value", (None, "text", [1.0]))
@pytest.mark.parametrize("make", (nn.LayerNorm, nn.RMSNorm, lambda size: nn.Sequential(nn.LayerNorm(size), nn.GELU())))
def test_what_is_no_tensor_raises_what_pytorch_raises(make: Callable[[int], nn.Module], value: object) -> None:
    model = make(4)
    swapped = normswap.optimize(model, torch.randn(2, 4))
    with pytest.raises(TypeError) as theirs:
        model(value)
    with pytest.raises(TypeError) as ours:
        swapped(value)
    assert str(ours.value) == str(theirs.value)
