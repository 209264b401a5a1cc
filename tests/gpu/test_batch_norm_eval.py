"""BatchNorm by running statistics, with the residual and the activation behind it, on the GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import seeded
from limits import assert_within, same_bits
from norm_act_models import NormAct
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops
from normswap.activation import CODES, NONE, Activation

DEVICE = "cuda"
SHAPES = ((64, 7), (5, 33, 9), (4, 64, 56, 56), (2, 2048, 7, 7), (3, 24, 5, 6), (2, 16, 3, 4, 5), (1, 4096, 2, 2))
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
PARAMETERS = {"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}
by_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def statistics(channels: int, dtype: torch.dtype, mean: float) -> list[Tensor]:
    """Running mean and variance, weight and bias."""
    var = torch.rand(channels, device=DEVICE) + 0.1
    return [drawn((channels,), dtype, mean), var.to(dtype), drawn((channels,), dtype, 1.0), drawn((channels,), dtype)]


def column(values: Tensor, like: Tensor) -> Tensor:
    return values.double().reshape(1, -1, *(1,) * (like.dim() - 2))


@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
@pytest.mark.case("channels-last", "output-strides", "mixed-weights")
def test_within_the_criterion(shape: tuple[int, ...], dtype: torch.dtype, mean: float, last: bool) -> None:
    x = drawn(shape, dtype, mean)
    x = x.contiguous(memory_format=LAYOUTS[x.dim()]) if last and x.dim() in LAYOUTS else x
    for kept in {dtype, torch.float32}:
        running_mean, var, weight, bias = statistics(shape[1], kept, mean)
        ours = ops.batch_norm_eval(x, running_mean, var, weight, bias, 1e-3)
        rstd = (column(var, x) + 1e-3).rsqrt()
        expected = (x.double() - column(running_mean, x)) * rstd * column(weight, x) + column(bias, x)
        terms = rstd * (x.double().abs() + column(running_mean, x).abs()) * column(weight, x).abs()
        assert_within(ours, expected, terms + column(bias, x).abs())
        assert ours.stride() == x.stride() and ours.dtype is dtype
        assert all(same_bits(ours, ops.batch_norm_eval(x, running_mean, var, weight, bias, 1e-3)) for _ in range(3))
        assert same_bits(ours[:1], ops.batch_norm_eval(x[:1].clone(), running_mean, var, weight, bias, 1e-3))


@by_dtype
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("residual", (False, True), ids=("plain", "residual"))
def test_what_stands_behind_is_done_with_the_rounded_norm(name: str, dtype: torch.dtype, residual: bool) -> None:
    activation = Activation(name, *PARAMETERS.get(name, (0.0, 0.0)))
    for shape in ((4, 24, 9, 7), (4, 64, 16, 16)):
        x, values = drawn(shape, dtype), statistics(shape[1], dtype, 0.3)
        added = drawn(shape, dtype) if residual else None
        normalised = ops.batch_norm_eval(x, *values)
        expected = activation(normalised if added is None else normalised + added)
        ours = ops.batch_norm_eval(x, *values, activation=activation, residual=added)
        error = (ours.double() - expected.double()).abs()
        step = torch.finfo(dtype).eps * expected.double().abs().clamp(min=1e-2)
        assert bool((error <= 4 * step).all()), float((error / step).max())


@by_dtype
@pytest.mark.case("misaligned", "strided-input")
def test_odd_addresses_and_strides(dtype: torch.dtype) -> None:
    values = statistics(6, dtype, 0.0)
    flat = drawn((4 * 6 * 5 * 7 + 1,), dtype)
    misaligned = flat[1:].view(4, 6, 5, 7)
    aligned = misaligned.clone()
    expected = ops.batch_norm_eval(aligned, *values, activation=Activation("relu"))
    assert same_bits(ops.batch_norm_eval(misaligned, *values, activation=Activation("relu")), expected)
    for strided in (aligned.transpose(2, 3), aligned[:, :, ::2], aligned[:1].expand(3, -1, -1, -1)):
        ours, theirs = ops.batch_norm_eval(strided, *values), F.batch_norm(strided, *values)
        torch.testing.assert_close(ours, theirs)


@by_dtype
def test_absent_parameters_many_channels_and_nan(dtype: torch.dtype) -> None:
    x = drawn((3, 5000, 2), dtype)
    mean, var, *_ = statistics(5000, dtype, 0.0)
    torch.testing.assert_close(ops.batch_norm_eval(x, mean, var), F.batch_norm(x, mean, var))
    x, (mean, var, weight, bias) = drawn((3, 8, 4), dtype), statistics(8, dtype, 0.0)
    x[0, 1, 2], var[3] = torch.nan, -1.0
    ours = ops.batch_norm_eval(x, mean, var, weight, bias, activation=Activation("relu"))
    theirs = F.relu(F.batch_norm(x, mean, var, weight, bias))
    assert bool((ours.isnan() == theirs.isnan()).all())
    assert ops.batch_norm_eval(x[:0], mean, var, weight, bias).shape == (0, 8, 4)


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rounding's difference in one block is none of 2^-11 in the next."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        out += x
        return self.act(out)


@by_dtype
@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last), ids=("NCHW", "NHWC"))
@pytest.mark.case("region")
@pytest.mark.usefixtures("without_tf32")
def test_a_block_is_swapped_and_proved(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    model = nn.Sequential(*(Residual() for _ in range(3))).to(DEVICE, dtype).eval()
    for block in model:
        for values in (block.bn.weight, block.bn.bias, block.bn.running_mean):
            nn.init.normal_(values)
        block.bn.running_var.uniform_(0.5, 2.0)
    model.to(memory_format=memory_format)
    x = drawn((8, 16, 20, 20), dtype).to(memory_format=memory_format)
    with torch.no_grad():
        fast = normswap.optimize(model, x, min_speedup=None)
        assert [row["status"] for row in normswap.report(fast).rows] == ["proved"] * 3
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            ours = fast(x)
    # One of the two in each region: the norm behind the convolution, or the norm folded into it.
    assert sum("BatchNormEval" in event.name or "fold_rows" in event.name for event in seen.events()) == 3
    torch.testing.assert_close(ours, model(x), rtol=2e-2, atol=2e-2 * float(ours.abs().max()))
    fast.train()
    model.train()
    torch.testing.assert_close(fast(x), model(x))


@by_dtype
@torch.no_grad()
def test_a_norm_that_ends_in_an_activation_is_proved(dtype: torch.dtype) -> None:
    norms = (NormAct(act, channels=16) for act in (None, nn.SiLU(), nn.Hardswish()))
    model = seeded(nn.Sequential(*norms)).to(DEVICE, dtype)
    x = drawn((8, 16, 20, 20), dtype).to(memory_format=torch.channels_last)
    fast = normswap.optimize(model.eval(), x, min_speedup=None)
    assert [row["status"] for row in normswap.report(fast).rows] == ["proved"] * 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        ours = fast(x)
    assert sum("BatchNormEval" in event.name for event in seen.events()) == 3
    torch.testing.assert_close(ours, model(x), rtol=2e-2, atol=2e-2)


def test_gradients_are_pytorchs() -> None:
    x, values = drawn((4, 8, 5), torch.float32).requires_grad_(), statistics(8, torch.float32, 0.0)
    weight = values[2].requires_grad_()
    activation = Activation("silu")
    ours = ops.batch_norm_eval(x, *values, activation=activation)
    theirs = F.silu(F.batch_norm(x, *values))
    dy = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(out, (x, weight), dy) for out in (ours, theirs))
    torch.testing.assert_close(found, expected)
    assert activation != NONE
