"""l2_norm and frobenius_norm on the GPU, along rows and other dims, against float64."""

from __future__ import annotations

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, gpu_of_plans, same_bits, tensor
from torch import Tensor

from normswap import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (
    *(1, 2, 7, 33, 64, 96, 130, 192, 256, 258, 512, 1000, 1001, 1024),
    *(4096, 4097, 8192, 20_480, 65_535, 65_536, 131_073, 262_144),
)
SHAPES = (((4, 64, 20, 16), 1), ((3, 5, 7), 1), ((300, 65), 0), ((2, 513, 24), 1), ((5000, 40), 0), ((2, 96, 7, 7), -3))
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check(ours: Tensor, x: Tensor, norm: Tensor, eps: float = 0.0) -> None:
    """Against x / max(norm, eps), both rounded to the dtype. Where the float64 ``norm`` lies within float32 error of a
    tie of its dtype, its rounding may go the other way: one ulp."""
    dtype = x.dtype
    exact = x.double() / norm.to(dtype).clamp_min(eps).double()
    ulp = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps
    tie = ulp * exact.abs() * ((norm * (1 - 2**-20)).to(dtype) != (norm * (1 + 2**-20)).to(dtype)) * 2.0**24 / 4
    assert ours.dtype == dtype
    assert_within(ours, exact, exact.abs() + tie, f"{tuple(x.shape)} {dtype}")


@by_dtype
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("ragged-rows", "long-row", "dtypes", "one-element")
def test_rows(dtype: torch.dtype, mean: float) -> None:
    for cols in LENGTHS:
        x = tensor((33 if cols < 10_000 else 3, cols), dtype, mean)
        check(ops.l2_norm(x), x, x.double().norm(dim=-1, keepdim=True))
        check(ops.l2_norm(x, -1, 20.0), x, x.double().norm(dim=-1, keepdim=True), 20.0)


@by_dtype
@pytest.mark.case("other-dim", "output-strides")
def test_along_other_dims(dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        x = tensor(shape, dtype, 0.3)
        for given in (x, x.transpose(-1, -2), x.view(*shape, 1)[..., 0]):
            along = dim if given.shape == x.shape else 0
            ours = ops.l2_norm(given, along, 1e-12)
            check(ours, given, given.double().norm(dim=along, keepdim=True), 1e-12)
            assert ours.stride() == F.normalize(given, dim=along).stride()
    image = tensor((2, 96, 5, 6), dtype).to(memory_format=torch.channels_last)
    assert ops.l2_norm(image, 1).stride() == image.stride()
    check(ops.l2_norm(image, 1), image, image.double().norm(dim=1, keepdim=True))


@by_dtype
def test_frobenius_norm(dtype: torch.dtype) -> None:
    for shape in ((5,), (33, 77), (64, 1000), (1024, 1024), (3000, 4001), (2, 3, 5, 7)):
        x = tensor(shape, dtype)
        check(ops.frobenius_norm(x), x, x.double().norm())
        shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(shape).copy_(x)
        assert same_bits(ops.frobenius_norm(shifted), ops.frobenius_norm(x))
    image = tensor((2, 96, 5, 6), dtype).to(memory_format=torch.channels_last)
    assert ops.frobenius_norm(image).stride() == image.stride()
    check(ops.frobenius_norm(image), image, image.double().norm())


@by_dtype
def test_every_regime_gives_the_same_bits(dtype: torch.dtype) -> None:
    compared, gpu = set(), gpu_of_plans()
    for cols in (c for c in LENGTHS if c > 256):
        x = tensor((5, cols), dtype)
        first, ragged = ops.l2_norm(x), cols * x.element_size() % 16 > 0
        for regime in range(1, 8):
            if (
                launch_plans.row_plan(5, cols, x.element_size(), ragged=ragged, options=True, regime=regime, **gpu)
                is not None
            ):
                out = torch.full_like(x, float("nan"))
                torch.ops.normswap.l2_norm(x, cols, 0.0, out, None, regime)
                assert same_bits(out, first), (cols, regime)
                compared.add(regime)
    assert compared == {2, 3, 4, 5}


@by_dtype
@pytest.mark.case("zero-rows", "non-finite-rows", "large-values")
def test_special_values_stay_in_their_row(dtype: torch.dtype) -> None:
    for cols in (33, 1024, 5000):
        x = tensor((6, cols), dtype)
        x[1], x[2, 3], x[4, 5] = 0.0, float("inf"), float("nan")
        for eps in (0.0, 1e-6):
            ours, pytorch = ops.l2_norm(x, -1, eps), x / x.norm(dim=-1, keepdim=True).clamp_min(eps)
            assert torch.equal(ours.isnan(), pytorch.isnan()) and torch.equal(ours.isinf(), pytorch.isinf())


@by_dtype
def test_autocast_gives_what_pytorch_gives(dtype: torch.dtype) -> None:
    x = tensor((4, 33), dtype)
    with torch.autocast("cuda"):
        for ours, pytorch in (
            (ops.l2_norm(x, -1, 1e-12), F.normalize(x, dim=-1)),
            (ops.frobenius_norm(x), x / torch.norm(x)),
        ):
            assert ours.dtype == pytorch.dtype
            torch.testing.assert_close(ours, pytorch)


def test_gradients() -> None:
    x = tensor((4, 9, 6), torch.float32)
    for function in (ops.l2_norm, lambda x: ops.l2_norm(x, 1, 2.0), ops.frobenius_norm):
        found = []
        for dtype in (torch.float32, torch.float64):
            leaf = x.to(dtype, copy=True).requires_grad_()
            found.append(
                torch.autograd.grad(function(leaf), leaf, tensor((4, 9, 6), torch.float32, seed=1).to(dtype))[0]
            )
        torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=1e-6)
