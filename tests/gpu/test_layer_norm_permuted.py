"""layer_norm of permuted images on the GPU: what lies as NCHW and comes out as NHWC, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, kernels, same_bits, tensor
from row_checks import DTYPES, check_layer_norm, gradients
from torch import Tensor

from normswap import ops

SHAPES = (
    *((2, 96, 20, 16), (3, 98, 5, 7), (1, 768, 7, 7), (2, 1024, 3, 4), (5, 2, 1, 9), (2, 384, 14, 14)),
    *((1, 64, 33, 1), (4, 192, 2, 2), (2, 1500, 3, 3), (2, 128, 9, 5), (3, 256, 7, 7), (1, 512, 4, 4)),
    *((150, 34, 8, 7), (140, 40, 6, 6), (260, 70, 5, 5)),  # more positions a block
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


def permuted(shape: tuple[int, ...], dtype: torch.dtype, mean: float) -> tuple[Tensor, Tensor, Tensor]:
    """An image of that shape with its channels last, and a weight and a bias."""
    n = shape[1]
    return tensor(shape, dtype, mean).movedim(1, -1), tensor((n,), dtype, 0.5, seed=1), tensor((n,), dtype, seed=2)


@by_dtype
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("dtypes", "never-writes-input", "strided-input")
def test_forward(dtype: torch.dtype, mean: float) -> None:
    for shape in SHAPES:
        x, weight, bias = permuted(shape, dtype, mean)
        before = x.clone()
        check_layer_norm(x, weight, bias)
        ours = ops.layer_norm(x, x.shape[-1:], weight, bias)
        assert ours.is_contiguous() and ours.dtype == dtype and same_bits(x, before)
        wide, ones = (weight.float(), bias.float()), torch.ones_like(weight)
        assert same_bits(ops.layer_norm(x, x.shape[-1:], *wide), ours)
        assert same_bits(ops.layer_norm(x, x.shape[-1:]), ops.layer_norm(x, x.shape[-1:], ones, ones * 0))


@by_dtype
def test_one_kernel_where_channels_make_whole_words(dtype: torch.dtype) -> None:
    x, weight, bias = permuted((2, 96, 20, 16), dtype, 0.0)
    found = kernels(lambda: ops.layer_norm(x, (96,), weight, bias))
    (only,) = [name for name in found if "normswap" in name or "at::native" in name]
    assert "permuted_layer_norm" in only
    odd = x.movedim(-1, 1)[:, :95].contiguous().movedim(1, -1)
    found = kernels(lambda: ops.layer_norm(odd, (95,)))
    assert any("permuted_layer_norm" in name for name in found) == (dtype is torch.float32)


@by_dtype
@pytest.mark.case("misaligned", "strided-input", "output-strides")
def test_other_layouts(dtype: torch.dtype) -> None:
    x, weight, bias = permuted((2, 24, 5, 6), dtype, 1.0)
    image = x.movedim(-1, 1)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(image.shape).copy_(image).movedim(1, -1)
    by_row = image.permute(2, 0, 1, 3).contiguous().permute(1, 0, 3, 2)  # (5, 2, 24, 6) in memory, as (2, 5, 6, 24)
    flat, odd = tensor((24, 40), dtype).t(), tensor((3, 7, 11), dtype, 1.0).transpose(1, 2)
    for given in (shifted, by_row, x[:, ::2], x[:1].expand(3, -1, -1, -1), x[..., 0:1, :], flat):
        check_layer_norm(given, weight, bias)
        assert ops.layer_norm(given, (24,), weight, bias).stride() == F.layer_norm(given, (24,), weight, bias).stride()
    check_layer_norm(odd, weight[:7], bias[:7])


@by_dtype
def test_a_position_does_not_depend_on_the_batch_or_the_run(dtype: torch.dtype) -> None:
    lanes = ((6, 96, 8, 8), (6, 128, 7, 7), (6, 192, 5, 5), (6, 512, 4, 6), (6, 768, 7, 7))  # have words in registers
    for shape in (*lanes, (6, 700, 5, 5), (150, 34, 8, 7), (260, 70, 5, 5)):
        x, weight, bias = permuted(shape, dtype, 1.0)
        size = x.shape[-1:]
        out = ops.layer_norm(x, size, weight, bias)
        image = x.movedim(-1, 1)
        for _ in range(5):
            assert same_bits(out, ops.layer_norm(x, size, weight, bias))
        alone = image[2:3].contiguous().movedim(1, -1)
        assert same_bits(out[2:3], ops.layer_norm(alone, size, weight, bias))
        few = image[:, :, :2, :3].contiguous().movedim(1, -1)
        assert same_bits(out[:, :2, :3], ops.layer_norm(few, size, weight, bias))


@by_dtype
@pytest.mark.parametrize("n", (96, 100, 256, 768))
def test_gradients(n: int, dtype: torch.dtype) -> None:
    x, weight, bias = permuted((2, n, 6, 5), dtype, 1.0)
    dy = tensor((2, 6, 5, n), dtype, seed=5)
    ours = gradients(lambda x, w, b: ops.layer_norm(x, (n,), w, b), (x, weight, bias), dy)
    exact = [t.double() for t in (x, weight, bias)]
    expected = gradients(lambda x, w, b: F.layer_norm(x, (n,), w, b), exact, dy.double())
    x64, dy64 = exact[0], dy.double()
    rstd = (x64.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat, g = rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()), (dy64 * exact[1]).abs()
    dx = rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))
    sizes = (dx, (dy64.abs() * xhat).sum((0, 1, 2)), dy64.abs().sum((0, 1, 2)))
    for mine, reference, size in zip(ours, expected, sizes, strict=True):
        assert_within(mine, reference, size)
