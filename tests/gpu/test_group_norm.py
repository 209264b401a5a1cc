"""group_norm in both layouts on the GPU against float64."""

from __future__ import annotations

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, gpu_of_plans, same_bits, tensor
from torch import Tensor

from normswap import ops
from normswap.activation import Activation

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_ACTIVATION = (0, 0.0, 0.0, None)
"""The op's arguments for no activation and no residual."""
SHAPES = (  # input, groups
    ((2, 4), 2),
    ((3, 6, 5), 6),
    ((2, 8, 7, 7), 1),
    ((2, 32, 8, 8), 8),
    ((5, 10, 3, 3), 5),
    ((2, 64, 56, 56), 32),
    ((1, 320, 64, 64), 32),
    ((2, 12, 4, 5, 6), 3),
    ((2, 128, 130, 131), 4),
    ((300, 640, 2, 2), 32),
    ((1, 8, 1024, 1024), 2),
    ((60, 16, 96, 96), 4),  # a team does several rows
    *(((2, channels, size, size), 32) for channels, size in ((512, 28), (1024, 14), (2048, 7), (2048, 6), (256, 9))),
)


def check_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, ours: Tensor) -> None:
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    reference = F.group_norm(x64, groups, w64, b64)
    flat = x64.reshape(x.shape[0], groups, -1)
    rstd = (flat.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    size = (rstd * (flat.abs() + flat.square().mean(-1, keepdim=True).sqrt())).reshape(x.shape)
    channel = (1, -1, *(1,) * (x.dim() - 2))
    size = size * w64.abs().view(channel) + b64.abs().view(channel)
    assert_within(ours, reference, size, f"group_norm {tuple(x.shape)} {groups} {x.stride()}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.case("group-norm-ranks", "group-norm-wide-batch", "output-strides")
def test_group_norm(dtype: torch.dtype, mean: float) -> None:
    for shape, groups in SHAPES:
        x = tensor(shape, dtype, mean)
        weight, bias = tensor(shape[1:2], dtype, 0.5), tensor(shape[1:2], dtype, 0.0, seed=1)
        ours = ops.group_norm(x, groups, weight, bias)
        assert ours.stride() == F.group_norm(x, groups, weight, bias).stride()
        check_group_norm(x, groups, weight, bias, ours)
        assert same_bits(ours, ops.group_norm(x, groups, weight, bias))
        assert same_bits(ours[:1], ops.group_norm(x[:1], groups, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.case("channels-last")
def test_group_norm_channels_last(dtype: torch.dtype, mean: float) -> None:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for shape, groups in SHAPES:
        if len(shape) not in layouts:
            continue
        x = tensor(shape, dtype, mean).to(memory_format=layouts[len(shape)])
        weight, bias = tensor(shape[1:2], dtype, 0.5), tensor(shape[1:2], dtype, 0.0, seed=1)
        ours = ops.group_norm(x, groups, weight, bias)
        assert ours.stride() == x.stride()
        check_group_norm(x, groups, weight, bias, ours)
        assert same_bits(ours, ops.group_norm(x, groups, weight, bias))
        assert same_bits(ours[:1], ops.group_norm(x[:1], groups, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm_regimes_give_the_same_bits(dtype: torch.dtype) -> None:
    compared = 0
    for shape, groups in SHAPES:
        x = tensor(shape, dtype, 3.0)
        cols = x[0].numel() // groups
        weight, bias = tensor(shape[1:2], dtype, 0.5), tensor(shape[1:2], dtype, 0.0, seed=1)
        outs = []
        for regime in (0, 2, 3, 4, 5, 6, 7):
            if launch_plans.row_plan(1, cols, x.element_size(), regime=regime, **gpu_of_plans()) is None:
                continue
            out = torch.empty_like(x)
            torch.ops.normswap.group_norm(x, weight, bias, groups, 1e-5, False, *NO_ACTIVATION, out, None, None, regime)
            outs.append(out)
        assert all(same_bits(outs[0], out) for out in outs[1:]), (shape, groups)
        compared += len(outs) - 1
    assert compared >= 15


COLUMN_SHAPES = (  # input, groups: every regime, odd channels, groups that cross vectors, strips that do not divide
    ((2, 64, 7, 7), 8),
    ((2, 320, 64, 64), 32),
    ((3, 30, 40, 25), 3),
    ((2, 21, 50, 50), 7),
    ((1, 96, 72, 70), 32),
    ((2, 128, 130, 131), 4),
    ((2, 640, 2, 2), 32),
    ((1, 64, 4, 4), 64),
    ((2, 1024, 50, 50), 1),
    ((1, 128, 300, 301), 32),
    ((1, 128, 512, 512), 32),
    ((1, 40, 1000, 1001), 5),
    *(((2, channels, size, size), 32) for channels, size in ((256, 56), (512, 28), (1024, 14), (2048, 7), (1280, 16))),
)
COLUMN_REGIMES = (0, 3, 4, 5)


def channels_last(shape: tuple[int, ...], dtype: torch.dtype, mean: float, seed: int = 0) -> Tensor:
    return tensor(shape, dtype, mean, seed).to(memory_format=torch.channels_last)


def group_norm_in(regime: int, x: Tensor, groups: int, weight: Tensor, bias: Tensor, activation: int = 0) -> Tensor:
    out = torch.full_like(x, 77.0)
    torch.ops.normswap.group_norm(
        x, weight, bias, groups, 1e-5, True, activation, *NO_ACTIVATION[1:], out, None, None, regime
    )
    return out


def column_regimes(x: Tensor, groups: int) -> list[int]:
    """The regimes that can do this, automatic first."""
    rows = x[0, 0].numel()
    plans = {
        regime: launch_plans.column_plan(
            x.shape[0], rows, x.shape[1], groups, x.element_size(), regime=regime, **gpu_of_plans()
        )
        for regime in COLUMN_REGIMES
    }
    return [regime for regime, plan in plans.items() if plan is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("channels-last", "offset-mean")
def test_column_regimes_give_the_same_accurate_bits(dtype: torch.dtype, mean: float) -> None:
    served = set()
    for shape, groups in COLUMN_SHAPES:
        x = channels_last(shape, dtype, mean)
        weight, bias = tensor(shape[1:2], dtype, 0.5), tensor(shape[1:2], dtype, 0.0, seed=1)
        regimes = column_regimes(x, groups)
        ours = group_norm_in(0, x, groups, weight, bias)
        check_group_norm(x, groups, weight, bias, ours)
        for regime in regimes[1:]:
            assert same_bits(ours, group_norm_in(regime, x, groups, weight, bias)), (shape, groups, regime)
        assert same_bits(ours[-1:], group_norm_in(0, x[-1:], groups, weight, bias)), (shape, groups)
        served |= set(regimes)
    assert served >= {0, 3, 5}


@pytest.mark.parametrize("regime", COLUMN_REGIMES)
def test_column_regimes_repeat_bit_for_bit(regime: int) -> None:
    for shape, groups in COLUMN_SHAPES:
        x = channels_last(shape, torch.float16, 3.0)
        weight, bias = tensor(shape[1:2], torch.float32, 0.5), tensor(shape[1:2], torch.float32, seed=1)
        if regime not in column_regimes(x, groups):
            continue
        first = group_norm_in(regime, x, groups, weight, bias)
        assert all(same_bits(first, group_norm_in(regime, x, groups, weight, bias)) for _ in range(49)), shape


@pytest.mark.case("non-finite-rows")
def test_non_finite_values_stay_in_their_group() -> None:
    for shape, groups in COLUMN_SHAPES:
        x = channels_last(shape, torch.float32, 1.0)
        clean = x.clone()
        x[0, 0, 0, 0] = float("nan")
        x[-1, -1, -1, -1] = float("inf")
        weight, bias = tensor(shape[1:2], torch.float32, 0.5), tensor(shape[1:2], torch.float32, seed=1)
        eager = F.group_norm(x, groups, weight, bias)
        for regime in column_regimes(x, groups):
            ours = group_norm_in(regime, x, groups, weight, bias)
            assert torch.equal(ours.isnan(), eager.isnan()), (shape, groups, regime)
            finite = ~eager.isnan()
            assert torch.equal(ours[finite], group_norm_in(regime, clean, groups, weight, bias)[finite])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (0.1, 1000 / 3, -7e4, 1e-30))
@pytest.mark.case("constant-rows")
def test_columns_of_one_value_have_exactly_that_mean(dtype: torch.dtype, value: float) -> None:
    for shape, groups in COLUMN_SHAPES:
        batch, channels = shape[:2]
        values = value * (1 + torch.arange(batch * groups, device="cuda") % 7).to(dtype).reshape(batch, groups)
        x = torch.empty(shape, dtype=dtype, device="cuda", memory_format=torch.channels_last)
        x.copy_(values.repeat_interleave(channels // groups, 1)[:, :, None, None].expand(shape))
        out, mean, rstd = torch.empty_like(x), *torch.empty(2, batch, groups, device="cuda")
        for regime in column_regimes(x, groups):
            torch.ops.normswap.group_norm(x, None, None, groups, 1e-5, True, *NO_ACTIVATION, out, mean, rstd, regime)
            finite = values.isfinite()
            assert torch.equal(mean[finite], values.float()[finite]), (shape, groups, regime)
            assert bool((rstd[finite] == torch.tensor(1e-5, device="cuda").sqrt().reciprocal()).all())


@pytest.mark.case("non-finite-rows")
def test_sums_that_overflow_are_alike_in_every_regime() -> None:
    for shape, groups in COLUMN_SHAPES:
        x = channels_last(shape, torch.float32, 0.0)
        x[:, :, shape[2] // 5 : shape[2] // 5 * 2 + 1] = 3e35
        found = []
        for regime in column_regimes(x, groups):
            out, mean, rstd = torch.empty_like(x), *torch.empty(2, shape[0], groups, device="cuda")
            torch.ops.normswap.group_norm(x, None, None, groups, 1e-5, True, *NO_ACTIVATION, out, mean, rstd, regime)
            found.append((mean, rstd))
        for mean, rstd in found[1:]:
            assert same_bits(found[0][0], mean) and same_bits(found[0][1], rstd), (shape, groups)


@pytest.mark.case("misaligned")
def test_channels_last_at_any_address() -> None:
    for dtype in DTYPES:
        for shape, groups in (((2, 64, 9, 9), 8), ((2, 21, 50, 50), 7)):
            whole = channels_last(shape, dtype, 1.0)
            buffer = torch.empty(whole.numel() + 1, dtype=dtype, device="cuda")
            moved = buffer[1:].as_strided(whole.shape, whole.stride(), 1).copy_(whole)
            assert moved.data_ptr() % 16 != 0
            assert same_bits(ops.group_norm(moved, groups), ops.group_norm(whole, groups))


def test_groups_too_wide_for_a_block() -> None:
    for shape in ((2, 4100, 5, 5), (2, 1001, 5, 5)):
        x = channels_last(shape, torch.float16, 1.0)
        weight, bias = tensor(shape[1:2], torch.float16, 0.5), tensor(shape[1:2], torch.float16, seed=1)
        assert not column_regimes(x, 1)
        ours = ops.group_norm(x, 1, weight, bias)
        assert ours.stride() == x.stride()
        check_group_norm(x, 1, weight, bias, ours)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.case("autocast", "misaligned", "channels-last")
def test_float32_of_16_bits_and_residuals_of_any_number_of_vectors(dtype: torch.dtype) -> None:
    """Neighbouring lanes store their vectors together: also where one of them has none, or another row's."""
    rows = (((3, 6, 2, 4), 2), ((5, 2, 9, 24), 2), ((2, 2, 25, 136), 2), ((1, 2, 67, 808), 2), ((1, 1, 1003, 2008), 1))
    columns = (((2, 24, 9, 9), 3), ((2, 48, 33, 31), 6), ((2, 136, 20, 20), 17), ((1, 136, 300, 300), 17))
    for last, (shape, groups) in (*((False, one) for one in rows), *((True, one) for one in (*rows, *columns))):
        layout = torch.channels_last if last else torch.contiguous_format
        x = tensor(shape, dtype, 1.0).contiguous(memory_format=layout)
        weight, bias = (tensor(shape[1:2], torch.float32, mean, seed=1) for mean in (0.5, 0.0))
        for wide in (True, False):
            to = torch.float32 if wide else dtype
            affine = (weight, bias) if wide else (weight.to(dtype), bias.to(dtype))
            whole = tensor(shape, to, seed=2).contiguous(memory_format=layout)
            moved = torch.empty(whole.numel() + 1, dtype=to, device=DEVICE)[1:]
            moved = moved.as_strided(whole.shape, whole.stride(), 1).copy_(whole)
            with torch.autocast(DEVICE, dtype, enabled=wide):
                norm = ops.group_norm(x, groups, *affine)
                assert norm.dtype is to
                check_group_norm(x, groups, *affine, norm)
                for residual in (whole, moved):
                    out = ops.group_norm(x, groups, *affine, activation=Activation("relu"), residual=residual)
                    assert same_bits(out, (norm + residual).relu()), (shape, groups, layout, wide)


BOUNDS = (0.125, 2.0)
ACTIVATIONS = (
    lambda y: y,
    torch.relu,
    F.silu,
    F.gelu,
    lambda y: F.gelu(y, approximate="tanh"),
    lambda y: F.leaky_relu(y, BOUNDS[0]),
    lambda y: y.clamp(*BOUNDS),
    F.hardswish,
    torch.sigmoid,
    torch.tanh,
)


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between, elementwise; 0 where both are NaN or as good as zero."""
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    bits = [t.view(integers).long() for t in (a.contiguous(), b.contiguous())]
    ordered = [torch.where(b < 0, torch.iinfo(integers).min - b, b) for b in bits]
    apart = (ordered[0] - ordered[1]).abs()
    tiny = (a.abs().float() < 1e-30) & (b.abs().float() < 1e-30)
    return torch.where((a.isnan() & b.isnan()).contiguous() | tiny.contiguous(), 0, apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", range(10))
def test_activation_is_that_of_pytorch_on_our_output(dtype: torch.dtype, activation: int) -> None:
    for shape, groups in (*COLUMN_SHAPES[:9], ((4, 8, 16, 16), 2), ((2, 6, 5, 5), 2), ((1, 32, 256, 260), 8)):
        x = tensor(shape, dtype, 1.0)
        x[0, 0, 0, 0] = float("nan")
        weight, bias = tensor(shape[1:2], dtype, 3.0), tensor(shape[1:2], dtype, seed=1)
        for layout in (torch.contiguous_format, torch.channels_last):
            placed = x.contiguous(memory_format=layout)
            last = layout is torch.channels_last
            outs = [torch.empty_like(placed), torch.empty_like(placed)]
            for out, number in zip(outs, (0, activation), strict=True):
                after = (number, *BOUNDS, None)
                torch.ops.normswap.group_norm(placed, weight, bias, groups, 1e-5, last, *after, out, None, None, 0)
            expected = ACTIVATIONS[activation](outs[0])
            assert torch.equal(outs[1].isnan(), expected.isnan())
            assert int(ulps_apart(outs[1], expected).max()) <= 1, (shape, groups, layout)


TEAM, SPLIT = 6, 5
"""Regimes (row_plan.h)."""
TEAM_SHAPES = (  # input, groups: of whole blocks, with channels longer than a chunk, as long and shorter; and not
    ((4, 64, 512, 512), 32),
    ((64, 3, 224, 224), 1),
    ((20, 512, 32, 32), 1),
    ((20, 2048, 16, 16), 1),
    ((32, 16_384, 3, 3), 1),
    ((16, 1024, 57, 32), 8),
)


def contiguous_in(
    regime: int, x: Tensor, groups: int, weight: Tensor, bias: Tensor, activation: int = 0
) -> list[Tensor]:
    """The output, mean and rstd."""
    out = torch.full_like(x, 77.0)
    mean, rstd = (torch.full((x.shape[0], groups), 77.0, device=DEVICE) for _ in range(2))
    after = (activation, *BOUNDS, None)
    torch.ops.normswap.group_norm(x, weight, bias, groups, 1e-5, False, *after, out, mean, rstd, regime)
    return [out, mean, rstd]


@pytest.mark.parametrize(("shape", "groups"), TEAM_SHAPES, ids=str)
@pytest.mark.case("non-finite-rows")
def test_float32_groups_of_many_blocks(shape: tuple[int, ...], groups: int) -> None:
    """Held by a team: the bits of the kernels that read the input twice, in every run; and what is behind the norm."""
    x = tensor(shape, torch.float32, 3.0)
    weight, bias = tensor(shape[1:2], torch.float32, 0.5), tensor(shape[1:2], torch.float32, seed=1)
    rows, cols = shape[0] * groups, x[0].numel() // groups
    if launch_plans.row_plan(rows, cols, 4, regime=TEAM, **gpu_of_plans()) is None:
        pytest.skip("a multiprocessor here has no room for slices of two rows")
    ours = contiguous_in(TEAM, x, groups, weight, bias)[0]
    check_group_norm(x, groups, weight, bias, ours)
    assert same_bits(ours[-1:], ops.group_norm(x[-1:], groups, weight, bias))
    for activation in (1, 2, 3):
        after = contiguous_in(TEAM, x, groups, weight, bias, activation)[0]
        assert int(ulps_apart(after, ACTIVATIONS[activation](ours)).max()) <= 1, activation
    x[0, 0, 0, 0], x[-1, -1, -1, -1] = float("nan"), float("inf")
    expected = contiguous_in(SPLIT, x, groups, weight, bias)
    for _ in range(20):
        found = contiguous_in(TEAM, x, groups, weight, bias)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.case("empty-batch", "non-finite-rows", "constant-rows")
def test_group_norm_without_affine_empty_and_special() -> None:
    x = tensor((4, 6, 5, 5), torch.float32)
    torch.testing.assert_close(ops.group_norm(x, 3), F.group_norm(x, 3))
    empty = torch.empty(0, 4, 3, device="cuda", requires_grad=True)
    ops.group_norm(empty, 2).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 4, 3)
    x[1, 2, 0, 0] = float("nan")
    x[2, 4, 0, 0] = float("inf")
    x[3] = 7.0
    for layout in (torch.contiguous_format, torch.channels_last):
        placed = x.contiguous(memory_format=layout)
        ours, eager = ops.group_norm(placed, 3), F.group_norm(placed, 3)
        assert torch.equal(ours.isnan(), eager.isnan())
        assert torch.equal(ours[3], torch.zeros_like(ours[3]))


@pytest.mark.case("over-int32")
def test_group_norm_more_than_2_31_elements() -> None:
    x = torch.randn(2, 64, 64, 64, device="cuda", dtype=torch.float16).repeat(4100, 1, 1, 1)
    assert x.numel() > 2**31
    ours = ops.group_norm(x, 8)
    expected = ops.group_norm(x[:2], 8)
    assert torch.equal(ours[:2], expected) and torch.equal(ours[-2:], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", (False, True))
@pytest.mark.case("channels-last")
def test_group_norm_gradients(dtype: torch.dtype, channels_last: bool) -> None:
    shape, groups = (3, 12, 9, 9), 4
    x, w, b = tensor(shape, dtype, 1.0), tensor((12,), dtype, 0.5), tensor((12,), dtype, seed=2)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    dy = tensor(shape, dtype, seed=5)
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    ours = torch.autograd.grad(ops.group_norm(leaves[0], groups, *leaves[1:]), leaves, dy)
    exact_leaves = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.autograd.grad(F.group_norm(exact_leaves[0], groups, *exact_leaves[1:]), exact_leaves, dy.double())
    assert ours[0].stride() == x.stride()
    flat = x.double().reshape(3, groups, -1)
    rstd = (flat.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat = rstd * (flat.abs() + flat.square().mean(-1, keepdim=True).sqrt())
    g = (dy.double() * w.double().view(1, -1, 1, 1)).abs().reshape(flat.shape)
    size = rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))
    assert_within(ours[0], exact[0], size.reshape(shape), "dx")
    assert_within(ours[1], exact[1], (dy.double().abs() * xhat.reshape(shape)).sum((0, 2, 3)), "dweight")
    assert_within(ours[2], exact[2], dy.double().abs().sum((0, 2, 3)), "dbias")
