"""Every kernel at sizes small enough for compute-sanitizer, which scripts/gpu_check runs over this file.

racecheck (2025.3) ends in a hardware exception in 16-bit products of cuBLAS on Hopper, without any kernel of ours; so
what lies behind such a product is run on random numbers.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from accuracy import REGIMES, SHORT_LENGTHS, Setting, compared, settings, shares
from test_row_backward import KINDS, assert_right, behind, drawn, exact, native
from torch import Tensor, nn

import normswap
from normswap import ops, reference
from normswap.activation import CODES, Activation


class ChannelWeightedRMSNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight


DTYPES = (torch.float32, torch.bfloat16)


def multiplies_in_16_bits(setting: Setting) -> bool:
    return setting.kind == "linear_scale_batch_norm" and setting.dtype is not torch.float32


def test_every_regime_and_path() -> None:
    seen = set()
    for setting in settings(SHORT_LENGTHS, DTYPES, (1.0,)):
        if multiplies_in_16_bits(setting):
            continue
        ours, _ = shares(setting)
        assert ours <= 1.0, setting
        seen.add((setting.kind, setting.regime))
    rows = {(kind, regime) for kind in ("layer_norm", "rms_norm", "l1_norm", "group_norm") for regime in REGIMES}
    assert rows <= seen and len(seen) == len(rows) + 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype: torch.dtype) -> None:
    """The forward that saves statistics, and the backward kernels."""
    found = settings({"subwarp": (64,), "warp": (769,), "block": (2050,)}, (dtype,), (1.0,))
    weighted = Setting("rms_norm", "over channels", lambda: ChannelWeightedRMSNorm(130), (3, 130, 77), dtype, 1.0)
    for setting in [*found, *([weighted] if dtype is torch.float32 else [])]:  # in 16 bits it runs as it is
        if multiplies_in_16_bits(setting):
            continue
        module, x = setting.module(), setting.input()
        swap, *_ = normswap.plan(module).swaps
        comparison = compared(swap.match, module, x, True)
        assert comparison.kernel_ran and comparison.gradients and not comparison.problem, (setting, comparison)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_rows(kind: str, dtype: torch.dtype) -> None:
    """Rows that a warp, a block and a cluster hold, ragged and not, and rows that are read twice."""
    for cols, passes in (
        (7, 0),
        (130, 0),
        (256, 0),
        (1001, 0),
        (4096, 0),
        (4097, 0),
        (20_480, 0),
        (20_481, 0),
        (20_480, 2),
    ):
        x, dy, w = (drawn(rows, cols, dtype, mean) for rows, mean in ((33, 1.0), (33, 0.0), (1, 0.5)))
        assert_right(kind, native(kind, x, w[0], dy, passes), exact(kind, x, w[0], dy), (cols, passes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("relu", "silu"))
def test_backward_of_activations(name: str, dtype: torch.dtype) -> None:
    """What they make of the gradient, kept on chip or made twice."""
    for kind, (cols, passes) in itertools.product(
        ("layer_norm", "rms_norm"), ((96, 0), (1001, 0), (4096, 0), (4097, 0), (20_480, 0), (20_480, 2))
    ):
        x, dy, (w, b) = drawn(33, cols, dtype, 1.0), drawn(33, cols, dtype, 0.0), drawn(2, cols, dtype, 0.5)
        first, again = (behind(kind, name, x, w, b, dy, passes) for _ in range(2))
        assert all(map(torch.equal, first, again)), (kind, cols, passes)
    for shape, layout in itertools.product(
        ((2, 64, 7, 7), (2, 64, 28, 28)), (torch.contiguous_format, torch.channels_last)
    ):
        x, dy = (torch.randn(shape, device="cuda").to(dtype, memory_format=layout) for _ in range(2))
        leaves = [t.requires_grad_() for t in (x, *torch.rand(2, 64, device="cuda").to(dtype))]
        ours = torch.autograd.grad(
            ops.group_norm(leaves[0], 8, *leaves[1:], 1e-5, activation=Activation(name)), leaves, dy
        )
        z = nn.functional.group_norm(leaves[0].float(), 8, *(t.float() for t in leaves[1:]))
        theirs = torch.autograd.grad(Activation(name)(z), leaves, dy.float())
        for one, other in zip(ours, theirs, strict=True):
            assert float((one - other).norm() / other.norm()) < 0.05, (shape, layout)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_rows_that_few_lanes_share_or_one_warp_has(dtype: torch.dtype) -> None:
    """The last block has fewer rows than it could, and the tensors end with the last one."""
    many = torch.cuda.get_device_properties(0).multi_processor_count * 4 + 1
    short = (48, 96, 128, 136, 192, 256, 264, 512)
    for cols, rows in (*((c, r) for c in short for r in (1, 5, 133)), *((c, many) for c in (1032, 1288, 1536))):
        w = drawn(2, cols, dtype, 0.5)
        for x in (drawn(rows, cols, dtype, 1.0), drawn(1, rows * cols + 1, dtype, 1.0)[0, 1:].view(rows, cols)):
            for name, residual in itertools.product(("none", "silu"), (None, x)):
                out = ops.layer_norm(x, (cols,), *w, 1e-5, activation=Activation(name), residual=residual)
                out, total = out if residual is not None else (out, x)
                exact_norm = Activation(name)(nn.functional.layer_norm(total.double(), (cols,), *w.double(), 1e-5))
                assert float((out.double() - exact_norm).abs().max()) < 0.05, (cols, rows, name)


@pytest.mark.parametrize("low", (torch.bfloat16, torch.float16), ids=str)
def test_narrow_rows(low: torch.dtype) -> None:
    """Float32 rows whose results, and their gradients, have 16 bits, in each regime."""
    for cols, passes in (
        (8, 0),
        (128, 0),
        (264, 0),
        (768, 0),
        (4096, 0),
        (4104, 0),
        (20_480, 0),
        (20_488, 2),
        (65_544, 0),
    ):
        x, w = drawn(33, cols, torch.float32, 1.0), drawn(1, cols, torch.float32, 0.5)[0]
        out = ops.layer_norm(x, (cols,), w, w, dtype=low)
        assert torch.equal(out, ops.layer_norm(x, (cols,), w, w).to(low)), cols
        dy = drawn(33, cols, low, 0.0)
        assert_right(
            "layer_norm", native("layer_norm", x, w, dy, passes), exact("layer_norm", x, w, dy), (cols, passes)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", (True, False), ids=("training", "frozen"))
def test_batch_norm_with_its_backward(dtype: torch.dtype, training: bool) -> None:
    """Channels that are columns, part of a vector, lines and wider than a block; more pieces than a warp unites; held
    by a block, by a cluster and not."""
    for shape in (
        *((70, 24), (900, 40), (40_000, 8), (5, 33, 9), (3, 16, 7, 7), (3, 2, 4097), (2, 3, 2112), (7, 2, 4096)),
        (2, 2, 420_000),
    ):
        x, residual = (torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(2))
        weight, bias, mean, var = torch.rand(4, shape[1], device="cuda").unbind()
        stats, same = [mean.clone(), var + 0.5], [mean.clone(), var + 0.5]
        y = ops.batch_norm(x, *stats, weight, bias, training, 0.1, 1e-3, Activation("relu"), residual=residual)
        theirs = reference.batch_norm(
            x, *same, weight, bias, training, 0.1, 1e-3, Activation("relu"), residual=residual
        )
        torch.testing.assert_close((y, *stats), (theirs, *same), rtol=0.02, atol=0.02)
        dy = torch.randn_like(y)
        for ours, other in zip(*(torch.autograd.grad(out, (x, residual), dy) for out in (y, theirs)), strict=True):
            assert float(((ours - other).abs() > 0.05).double().mean()) < 0.02  # some lie at the ReLU's corner


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_what_lies_behind_a_16_bit_product(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, z = torch.randn(96, 48, device="cuda").to(dtype), (torch.randn(300, 96, device="cuda") + 1).to(dtype)
    b, scale, mean, gamma, beta = torch.randn(5, 96, device="cuda").to(dtype)
    var = torch.rand(96, device="cuda").to(dtype) + 0.5
    assert ops.native_serves(weight, z, b, scale, mean, var, gamma, beta)
    folded = ops.fold_scale_batch_norm(weight, b, scale, mean, var, gamma, beta, 1e-5)
    exact = reference.fold_scale_batch_norm(*(t.double() for t in (weight, b, scale, mean, var, gamma, beta)), 1e-5)
    for ours, theirs in zip(folded, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(dtype).eps, atol=1e-5)
    for training in (False, True):
        statistics = [mean.clone(), var.clone()], [mean.double(), var.double()]
        ours = ops.scale_batch_norm(z, scale, *statistics[0], gamma, beta, training)
        wide = (t.double() for t in (z, scale))
        theirs = reference.scale_batch_norm(*wide, *statistics[1], gamma.double(), beta.double(), training)
        for a, e in zip((ours, *statistics[0]), (theirs, *statistics[1]), strict=True):
            torch.testing.assert_close(a.double(), e, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("batch", "channels", "out_channels", "size", "kernel", "groups"),
    (
        *((2, 72, 136, 9, 3, 1), (12, 72, 64, 64, 1, 1), (8, 72, 128, 64, 1, 1)),
        *((2, 8, 40, 9, 1, 1), (2, 8, 24, 9, 1, 1), (2, 8, 40, 9, 3, 1)),
        *((2, 48, 48, 9, 3, 2), (2, 24, 24, 9, 3, 24), (2, 24, 24, 9, 5, 24)),
    ),
    ids=(
        *("small tiles", "tall", "large", "one stage", "narrow, one stage", "many zeros"),
        *("groups", "depthwise", "depthwise 5 x 5"),
    ),
)
@torch.no_grad()
def test_convolution(batch: int, channels: int, out_channels: int, size: int, kernel: int, groups: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_channels, channels // groups, kernel, kernel) / kernel
    x = torch.randn(batch, channels, size, size)
    mean, gamma, beta, bias = torch.randn(4, out_channels)
    var, added = torch.rand(out_channels) + 0.5, torch.randn(batch, out_channels, size, size)
    images = [t.to(torch.float16).contiguous(memory_format=torch.channels_last) for t in (x, weight, added)]
    vectors = [t.to(torch.float16) for t in (bias, mean, var, gamma, beta)]
    x, weight, added, bias, mean, var, gamma, beta = (t.cuda() for t in (*images, *vectors))
    how = (1, 1, kernel // 2, kernel // 2, 1, 1, groups)
    end = (CODES["relu"], 0.0, 0.0)
    op = torch.ops.normswap.convolution_batch_norm_eval_or_none
    ours = op(x, weight, bias, *how, mean, var, gamma, beta, 1e-3, added, *end)
    x, weight, added, bias, mean, var, gamma, beta = (t.cpu().float() for t in (*images, *vectors))
    sums = nn.functional.conv2d(x, weight, bias, 1, kernel // 2, 1, groups)
    exact = (nn.functional.batch_norm(sums, mean, var, gamma, beta, False, 0.0, 1e-3) + added).relu()
    torch.testing.assert_close(ours.cpu().float(), exact, rtol=2e-3, atol=2e-3 * channels**0.5)
