"""InstanceNorm without running statistics on the GPU: the op, modules, a whole model, layouts and autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, same_bits
from models import randomised
from norm_models import DTYPES, assert_alike, assert_close, assert_same_error, cotangent_of, swapped_copy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops

DEVICE = "cuda"
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = (
    (3, 6, 5),
    (2, 8, 7, 7),
    (2, 64, 56, 56),
    (2, 12, 4, 5, 6),
    (2, 3, 256, 256),
    (1, 4, 1024, 1024),
    (300, 640, 2, 2),
    (1, 2, 65535),
)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def check_op(x: Tensor) -> None:
    """Against float64, and repeatable; a sample's bits depend on that sample alone."""
    weight, bias = drawn(x.shape[1:2], x.dtype, 1.0), drawn(x.shape[1:2], x.dtype)
    ours = ops.instance_norm(x, weight, bias, 1e-5)
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    expected = F.instance_norm(x64, weight=w64, bias=b64, eps=1e-5)
    dims, channel = tuple(range(2, x.dim())), (-1, *(1,) * (x.dim() - 2))
    rstd = (x64.var(dims, correction=0, keepdim=True) + 1e-5).rsqrt()
    size = rstd * (x64.abs() + x64.square().mean(dims, keepdim=True).sqrt())
    size = size * w64.abs().view(channel) + b64.abs().view(channel)
    assert_within(ours, expected, size, f"instance_norm {tuple(x.shape)} {x.stride()}")
    assert ours.stride() == x.stride()
    assert same_bits(ours, ops.instance_norm(x, weight, bias, 1e-5))
    assert same_bits(ours[:1], ops.instance_norm(x[:1], weight, bias, 1e-5))


@by_dtype
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.case("instance-norm", "channels-last")
def test_the_op_in_both_layouts(dtype: torch.dtype, mean: float) -> None:
    for shape in SHAPES:
        x = drawn(shape, dtype, mean)
        check_op(x)
        if len(shape) in LAYOUTS:
            check_op(x.to(memory_format=LAYOUTS[len(shape)]))


@by_dtype
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.case("instance-norm", "unbatched-input")
def test_modules_are_proved_and_equal(affine: bool, training: bool, dtype: torch.dtype) -> None:
    shapes = {nn.InstanceNorm1d: (4, 6, 37), nn.InstanceNorm2d: (4, 6, 9, 7), nn.InstanceNorm3d: (2, 6, 5, 3, 4)}
    for cls, shape in shapes.items():
        model = randomised(cls(6, affine=affine)).to(DEVICE, dtype).train(training)
        for size in (shape, shape[1:]):
            x = drawn(size, dtype, 1.0)
            swapped = swapped_copy(model, x)
            assert_alike(model, swapped, x, cotangent_of(model, x))


@pytest.mark.case("mixed-weights")
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_float32_weights(dtype: torch.dtype) -> None:
    model, x = randomised(nn.InstanceNorm2d(6, affine=True)).to(DEVICE), drawn((4, 6, 9, 7), dtype)
    swapped = swapped_copy(model, x)  # proves the gradients too: PyTorch's own is 2% off in bfloat16
    assert swapped(x).dtype is dtype
    assert_close(swapped(x), model(x))


@pytest.mark.case("one-value-per-channel", "empty-batch")
def test_errors_are_pytorch_s() -> None:
    model = nn.InstanceNorm2d(6, affine=True).to(DEVICE)
    swapped = swapped_copy(model, drawn((4, 6, 9, 7), torch.float32))
    for shape in ((4, 6, 1, 1), (6, 1, 1), (4, 5, 9, 7), (4, 6)):
        x = drawn(shape, torch.float32)
        assert_same_error(lambda x=x: swapped(x), lambda x=x: model(x))


@pytest.mark.case("autocast")
def test_autocast_leaves_its_dtype_alone() -> None:
    model, x = randomised(nn.InstanceNorm2d(6, affine=True)).to(DEVICE), drawn((4, 6, 9, 7), torch.float16)
    with torch.autocast(DEVICE, torch.float16):
        swapped = swapped_copy(model, x)
        assert swapped(x).dtype is model(x).dtype is torch.float16
        assert_close(swapped(x), model(x))


@pytest.mark.case("double-backward")
def test_double_backward() -> None:
    x = drawn((2, 6, 5, 3), torch.float32).requires_grad_()
    weight, bias = (drawn((6,), torch.float32).requires_grad_() for _ in range(2))
    found = []
    for y in (ops.instance_norm(x, weight, bias), F.instance_norm(x, weight=weight, bias=bias)):
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, weight)))
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, "gradient")


@by_dtype
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=("contiguous", "channels_last"))
def test_a_whole_model_with_the_default_validation(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.InstanceNorm2d(8)
    )
    randomised(model).to(DEVICE, dtype).to(memory_format=layout)
    x = drawn((4, 3, 20, 20), dtype).to(memory_format=layout)
    swapped = normswap.optimize(model.eval(), x, min_speedup=None, on_mismatch="raise")
    report = normswap.report(swapped)
    assert report.swapped == ("", "1", "4") and report.model["passed"], str(report)
    assert {row["status"] for row in report.rows} == {"proved"}
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        swapped(x)
    names = [event.name for event in profiled.events()]
    assert sum(name.startswith("normswap::group_norm") for name in names) == 2 and "aten::instance_norm" not in names
