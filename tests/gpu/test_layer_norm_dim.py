"""layer_norm_dim on the GPU: the channels of NCHW and channels_last tensors, and other dims, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, same_bits, tensor
from torch import Tensor

from normswap import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    *(((4, 64, 20, 16), 1), ((3, 5, 7), 1), ((2, 130, 33), 1), ((300, 65), 0), ((2, 513, 24), 1), ((5000, 40), 0)),
    *(((2, 3, 4, 5, 6), -2), ((1, 320, 8, 8), 1), ((7, 1, 9), 1), ((2, 1024, 7, 7), 1), ((5, 96, 1, 1), 1)),
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check(ours: Tensor, x: Tensor, dim: int, weight: Tensor | None, bias: Tensor | None) -> None:
    rows, n = x.double().movedim(dim, -1), x.shape[dim]
    w = torch.ones(n, device="cuda", dtype=torch.double) if weight is None else weight.double()
    b = torch.zeros(n, device="cuda", dtype=torch.double) if bias is None else bias.double()
    rstd = (rows.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    magnitude = w.abs() * rstd * (rows.abs() + rows.square().mean(-1, keepdim=True).sqrt()) + b.abs()
    assert ours.shape == x.shape
    assert_within(ours.movedim(dim, -1), F.layer_norm(rows, (n,), w, b), magnitude, f"{tuple(x.shape)} {dim} {x.dtype}")


@by_dtype
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("other-dim", "dtypes", "never-writes-input")
def test_forward(dtype: torch.dtype, mean: float) -> None:
    for shape, dim in SHAPES:
        x = tensor(shape, dtype, mean)
        before = x.clone()
        n = shape[dim]
        for of in {dtype, torch.float32}:
            weight, bias = tensor((n,), of, 0.5, seed=1), tensor((n,), of, seed=2)
            for pair in ((weight, bias), (weight, None), (None, bias), (None, None)):
                ours = ops.layer_norm_dim(x, dim, *pair)
                check(ours, x, dim, *pair)
                assert ours.dtype == dtype and ours.stride() == x.stride() and same_bits(x, before)


@by_dtype
@pytest.mark.case("output-strides", "misaligned", "strided-input")
def test_layouts(dtype: torch.dtype) -> None:
    x = tensor((2, 24, 5, 6), dtype, 1.0)
    weight, bias = tensor((24,), dtype, 0.5, seed=1), tensor((24,), dtype, seed=2)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    for given in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3), shifted, x[:, :, ::2]):
        ours = ops.layer_norm_dim(given, 1, weight, bias)
        check(ours, given, 1, weight, bias)
        assert ours.stride() == (given * 2).stride()


@by_dtype
def test_a_position_does_not_depend_on_the_batch_or_the_run(dtype: torch.dtype) -> None:
    for channels in (96, 700):
        x = tensor((6, channels, 8, 8), dtype, 1.0)
        out = ops.layer_norm_dim(x, 1)
        assert same_bits(out, ops.layer_norm_dim(x, 1))
        assert same_bits(out[2:3], ops.layer_norm_dim(x[2:3].contiguous(), 1))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast_gives_float32(dtype: torch.dtype) -> None:
    x, weight = tensor((2, 24, 5, 6), dtype, 1.0), tensor((24,), torch.float32)
    with torch.autocast("cuda", dtype):
        ours = ops.layer_norm_dim(x, 1, weight, weight)
    assert ours.dtype == torch.float32
    check(ours, x, 1, weight, weight)


@by_dtype
def test_the_native_op_gives_the_bits_of_the_general_way(dtype: torch.dtype) -> None:
    x, weight = tensor((2, 24, 5, 6), dtype), tensor((24,), dtype)
    with torch.no_grad():
        direct = ops.layer_norm_dim(x, 1, weight, weight)
    assert same_bits(direct, ops.layer_norm_dim(x.clone().requires_grad_(), 1, weight, weight).detach())


def test_gradients() -> None:
    given = [tensor((2, 9, 3, 4), torch.float32), tensor((9,), torch.float32), tensor((9,), torch.float32, seed=2)]
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        out = ops.layer_norm_dim(leaves[0], 1, *leaves[1:])
        found.append(torch.autograd.grad(out, leaves, tensor((2, 9, 3, 4), torch.float32, seed=1).to(dtype)))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
