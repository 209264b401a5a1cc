"""An activation behind a GroupNorm, fused with it, on the GPU: the op against PyTorch's two, whole models, the table of
forms and traps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from activation_models import FUSED, SHAPE, TABLE, two_runs
from expression_checks import check
from models import Activated, randomised
from norm_models import DTYPES, assert_alike, assert_close, cotangent_of, swapped_copy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops, reference
from normswap.activation import CODES, Activation
from normswap.criterion import half_ulp
from normswap.in_float64 import Rounded

DEVICE = "cuda"
ACTIVATIONS = [Activation(name, *{"leaky_relu": (0.1,), "clamp": (-0.5, 1.0)}.get(name, ())) for name in CODES][1:]
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = (  # input, groups
    ((2, 4), 2),
    ((3, 6, 5), 6),
    ((2, 8, 7, 7), 1),
    ((5, 10, 3, 3), 5),
    ((2, 64, 56, 56), 32),
    ((2, 12, 4, 5, 6), 3),
    ((2, 128, 130, 131), 4),
    ((300, 640, 2, 2), 32),
    ((1, 8, 512, 512), 2),
)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def _convolutions_in_float32() -> Iterator[None]:
    """TF32 would make a thousandth of the last bit before a convolution, where that crosses a rounding."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def drawn(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def check_op(x: Tensor, groups: int, activation: Activation, centred: bool) -> None:
    """The fused op is the activation of our norm's rounded output, up to the activation's own rounding. PyTorch's two
    ops give the same up to a tolerance where x is centred; elsewhere 16 bits are too few for what they round."""
    weight, bias = drawn(x.shape[1:2], x.dtype, 1.0), drawn(x.shape[1:2], x.dtype)
    ours = ops.group_norm(x, groups, weight, bias, 1e-5, activation)
    normalised = ops.group_norm(x, groups, weight, bias)
    assert ours.stride() == normalised.stride() and ours.dtype is x.dtype
    exact = activation(normalised.double())
    # A sigmoid just below 1/2: an exponential just above 1, within an ulp; a sum just above 2; and a division.
    roundings = 5 if x.dtype is torch.float32 else 2
    limit = roundings * half_ulp(exact, x.dtype) + 2.0**-21 * normalised.double().abs()
    assert not int(((ours.double() - exact).abs() > limit).sum()), (x.shape, activation)
    if centred or x.dtype is torch.float32:
        assert_close(ours, reference.group_norm(x, groups, weight, bias, 1e-5, activation), f"{tuple(x.shape)}")
    assert torch.equal(ours, ops.group_norm(x, groups, weight, bias, 1e-5, activation))
    assert torch.equal(ours[:1], ops.group_norm(x[:1], groups, weight, bias, 1e-5, activation))


@by_dtype
@by_activation
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.case("fused-activation", "channels-last")
def test_the_op_in_both_layouts(activation: Activation, dtype: torch.dtype, mean: float) -> None:
    for shape, groups in SHAPES:
        x = drawn(shape, dtype, mean)
        check_op(x, groups, activation, mean == 0.0)
        if len(shape) in LAYOUTS:
            check_op(x.to(memory_format=LAYOUTS[len(shape)]), groups, activation, mean == 0.0)


@by_dtype
@by_activation
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=("contiguous", "channels_last"))
@pytest.mark.case("double-backward")
def test_gradients(activation: Activation, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = drawn((3, 12, 9, 7), dtype).to(memory_format=layout).requires_grad_()
    weight, bias = (drawn((12,), dtype).requires_grad_() for _ in range(2))
    dy, tensors = drawn(tuple(x.shape), dtype), (x, weight, bias)
    out = ops.group_norm(x, 4, weight, bias, 1e-5, activation)
    assert out.grad_fn.name() == "_GroupNormBackward"
    normalised = reference.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-5)
    # What the activation has corners at is rounded.
    expected = activation(normalised if dtype is torch.float32 else Rounded.apply(normalised, dtype))
    ours = torch.autograd.grad(out, tensors, dy, retain_graph=True)
    theirs = torch.autograd.grad(expected, tensors, dy.double(), retain_graph=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other.to(dtype), "gradient")
    if dtype is not torch.float32:
        return
    second = []
    for y in (out, expected):
        (first,) = torch.autograd.grad(y, x, dy.to(y.dtype), create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (x, weight)))
    for mine, other in zip(*second, strict=True):
        assert_close(mine, other, "gradient")


@by_activation
def test_nothing_finite_becomes_anything_else(activation: Activation) -> None:
    """Far from 0, where an exponential leaves the range of float32."""
    x = torch.linspace(-1.0, 1.0, 8192, device=DEVICE).view(1, 1, -1)
    for scale in (1.0, 1e2, 1e4, 1e30):
        weight = torch.full((1,), scale, device=DEVICE)
        assert_close(
            ops.group_norm(x, 1, weight, None, 1e-5, activation),
            reference.group_norm(x, 1, weight, None, 1e-5, activation),
        )


@by_dtype
def test_nan_and_inf_stay_in_their_row(dtype: torch.dtype) -> None:
    for value in (float("nan"), float("inf")):
        x = drawn((4, 6, 5, 3), dtype)
        x[2, 1, 0, 0] = value
        for activation in ACTIVATIONS:
            ours = ops.group_norm(x, 2, activation=activation)
            theirs = reference.group_norm(x, 2, activation=activation)
            assert torch.equal(ours.isnan(), theirs.isnan()), (value, activation)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, trap in TABLE.items() for mode in trap.modes])
@pytest.mark.case("fused-activation", "in-place-activation", "activation-look-alikes")
def test_it_is_fused_and_equal_or_refused(name: str, mode: str) -> None:
    check(TABLE[name], mode, DEVICE)


@by_dtype
@pytest.mark.parametrize("name", [n for n, t in TABLE.items() if t.plan == {"": FUSED} and not t.later])
def test_every_form_is_proved(name: str, dtype: torch.dtype) -> None:
    # A dropout that is on stands between a norm and its activation: they are not done together.
    model = randomised(TABLE[name].make()).to(DEVICE, dtype).train(name != "norm_act_with_dropout")
    swapped_copy(model, drawn((16, *SHAPE[1:]), dtype))


class Images(nn.Module):
    """A small net of all forms, on images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(8, 32), nn.SiLU(inplace=True))
        self.middle = nn.Sequential(nn.Conv2d(32, 64, 3), nn.GroupNorm(64, 64), nn.ReLU(inplace=True))
        self.norm = Activated(4, 64)
        self.head = nn.Sequential(nn.GroupNorm(1, 64), nn.GELU(), nn.Flatten(), nn.LazyLinear(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.stem(x))))


@by_dtype
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=("contiguous", "channels_last"))
def test_a_whole_model_with_the_default_validation(dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = drawn((4, 3, 16, 16), dtype).to(memory_format=layout)
    model = Images().to(DEVICE, dtype).eval()
    model(x)
    randomised(model).to(memory_format=layout)
    swapped = normswap.optimize(model, x, min_speedup=None, on_mismatch="raise")
    report = normswap.report(swapped)
    regions = [row["name"] for row in report.rows if row["kind"] == "region" and row["swapped"]]
    assert regions == ["stem", "middle", "norm", "head"] and report.model["passed"], str(report)
    assert {row["status"] for row in report.rows} == {"proved"}
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        swapped(x)
    names = [event.name for event in profiled.events()]
    assert sum(name.startswith("normswap::group_norm") for name in names) == 4
    assert not {"aten::silu", "aten::silu_", "aten::relu_", "aten::gelu", "aten::native_group_norm"} & {*names}
    timed = normswap.report(normswap.optimize(model, x, min_speedup=1e-6))
    assert {row["name"]: row["calls"] for row in timed.rows} == dict.fromkeys(report.swapped, 1)


@pytest.mark.case("torch-compile")
@pytest.mark.parametrize("training", (True, False))
def test_compiled_in_one_graph(training: bool) -> None:
    model = randomised(two_runs()).to(DEVICE).train(training)
    swapped = swapped_copy(model, drawn(SHAPE, torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
    for batch in (3, 5):
        x = drawn((batch, *SHAPE[1:]), torch.float32)
        assert_close(compiled(x), model(x))


@pytest.mark.case("autocast")
def test_under_autocast() -> None:
    model, x = randomised(Activated(2, SHAPE[1])).to(DEVICE), drawn(SHAPE, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        swapped = swapped_copy(model, x)
        assert_alike(model, swapped, x, cotangent_of(model, x))
        out = ops.group_norm(x.bfloat16(), 2, activation=Activation("silu"))
        assert out.dtype is torch.float32
        assert_close(out, F.silu(F.group_norm(x.bfloat16(), 2)))
