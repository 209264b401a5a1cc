"""Shapes and dtypes that a swapped norm must take on the GPU, or refuse with PyTorch's own error."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
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

from normswap import ops

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]
DEVICE = "cuda"


@pytest.mark.case("empty-batch")
@pytest.mark.parametrize(("make", "shape"), EMPTY, ids=shown)
def test_empty_batches(make: Make, shape: Shape) -> None:
    assert_swaps_alike(randomised(make()).to(DEVICE), torch.empty(shape, device=DEVICE))


@pytest.mark.case("empty-batch")
@pytest.mark.parametrize("training", (True, False))
def test_an_empty_batch_of_batch_norm(training: bool) -> None:
    model, x = made("linear_scale_batch_norm", DEVICE)
    swapped = swapped_copy(model.train(training), x)
    assert_same_outcome(model, swapped, torch.empty(0, 7, device=DEVICE))


@pytest.mark.case(
    "one-element", "normalized-shape-rank", "ragged-rows", "long-row", "many-rows", "group-norm-ranks", "dtypes"
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *ONE_ELEMENT,
        *NORMALIZED_SHAPES,
        *GROUPS,
        *(case for size in (769, 1001, 65535) for case in rows_of(size, 3)),
        *rows_of(262_145, 1),
        *rows_of(4, 65_537),
        (lambda: nn.GroupNorm(2, 4), (2, 4, 1001)),
        (lambda: nn.GroupNorm(32, 640), (256, 640, 2, 2)),
    ],
    ids=shown,
)
def test_shapes(make: Make, shape: Shape, dtype: torch.dtype) -> None:
    assert_swaps_alike(randomised(make()).to(DEVICE, dtype), drawn(shape, DEVICE, dtype))


@pytest.mark.case("many-rows")
@pytest.mark.parametrize("training", (True, False))
def test_many_rows_of_batch_norm(training: bool) -> None:
    assert_swaps_alike(randomised(Projection(8, 6)).train(training).to(DEVICE), drawn((65_537, 8), DEVICE))


@pytest.mark.case("one-value-per-channel", "bn-one-row")
@pytest.mark.parametrize(("make", "shape"), ONE_VALUE, ids=shown)
def test_one_value_per_channel_in_training_is_pytorchs_error(make: Make, shape: Shape) -> None:
    model = randomised(make()).train().to(DEVICE)
    swapped = swapped_copy(model, drawn((2, *shape[1:]), DEVICE))
    x = drawn(shape, DEVICE)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        swapped(x)
    assert_same_error(lambda: swapped(x), lambda: model(x))


@by_kind
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64))
@pytest.mark.case("dtypes", "float64")
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    assert_swaps_alike(*made(kind, DEVICE, dtype))


@pytest.mark.case("bad-shapes")
@pytest.mark.parametrize(("make", "shape"), BAD_SHAPES, ids=shown)
def test_bad_shapes_raise_what_pytorch_raises(make: Make, shape: Shape) -> None:
    model = randomised(make()).eval().to(DEVICE)
    swapped, x = swapped_copy(model, None), drawn(shape, DEVICE)
    assert_same_error(lambda: swapped(x), lambda: model(x))


@pytest.mark.case("normalized-shape-rank", "strided-input", "output-strides")
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_view(dtype: torch.dtype) -> None:
    random = Random(0)
    for _ in range(200):
        x = drawn_view(random, DEVICE, dtype)
        shape = x.shape[-random.randint(1, x.dim()) :]
        weight, bias = drawn(shape, DEVICE, dtype), drawn(shape, DEVICE, dtype)
        for what, ours, theirs in (
            ("layer_norm", ops.layer_norm(x, shape, weight, bias), F.layer_norm(x, shape, weight, bias)),
            ("rms_norm", ops.rms_norm(x, shape, weight, 1e-6), F.rms_norm(x, shape, weight, 1e-6)),
            ("l1_norm", ops.l1_norm(x), x / torch.mean(torch.abs(x), dim=-1, keepdim=True)),
        ):
            # Of a dim of size 1 the stride means nothing.
            strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (ours, theirs)]
            assert strides[0] == strides[1], (what, x.shape, x.stride())
            assert_close(ours, theirs, f"{what} {tuple(x.shape)} {x.stride()}")


@pytest.mark.case("over-int32")
def test_gradients_of_more_than_2_31_elements() -> None:
    rows, cols, tile = 33_000, 65_536, 8
    x = drawn((tile, cols), DEVICE, torch.float16).repeat(rows // tile, 1)
    assert x.numel() > 2**31
    weight = drawn((cols,), DEVICE, torch.float16)
    for op in (lambda x: ops.layer_norm(x, (cols,), weight), lambda x: ops.rms_norm(x, (cols,), weight, 1e-6)):
        (ours,) = torch.autograd.grad(op(x.requires_grad_()).square().sum(dtype=torch.float32), x)
        (part,) = torch.autograd.grad(op(few := x.detach()[:tile].requires_grad_()).square().sum(), few)
        for start in (0, rows // 2 // tile * tile, rows - tile):
            assert_close(ours[start : start + tile], part)


@pytest.mark.case("over-int32")
def test_l1_and_batch_norm_of_more_than_2_31_elements() -> None:
    rows, cols, tile = 33_000, 65_536, 8
    part = drawn((tile, cols), DEVICE, torch.float16)
    x = part.repeat(rows // tile, 1)
    for op in (ops.l1_norm, lambda z: ops.scale_batch_norm(z, None, None, None, training=True)):
        ours, expected = op(x), op(part)
        for start in (0, rows // 2 // tile * tile, rows - tile):
            assert_close(ours[start : start + tile], expected)
        del ours
