"""RMSNorms written by hand: every spelling that is swapped, every look-alike that is not, and what may change after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_rms_norm import DTYPES, Calls, assert_same, gradients, randomised
from torch import Tensor, nn

import normswap
from normswap import rules
from normswap.plan import Reason, Refusal

EPS = 1e-5
C = 6


class Norm(nn.Module):
    """What the forwards below read."""

    shape: tuple[int, ...] = (C,)
    extra: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.shape))
        self.eps = 1e-5
        self.register_parameter("bias", None)


class Unweighted(nn.Module):
    """No parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-3
        self.dim = -1
        self.with_scale = False
        self.force = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


# --- spellings ----------------------------------------------------------------------------------------------------


class Squared(Norm):
    def forward(self, x):
        y = x.float()
        return (self.weight * (y * torch.rsqrt(torch.square(y).mean(-1, keepdim=True) + self.eps))).type_as(x)


class Times(Norm):
    def forward(self, x):
        y = x.to(torch.float32)
        root = torch.sqrt((y * y).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (y / root).to(x.dtype)


class Reciprocal(Norm):
    def forward(self, x: Tensor) -> Tensor:
        """In the words of the paper."""
        dtype = x.dtype
        wide = x.to(dtype=torch.float32)
        rstd = 1 / torch.sqrt(torch.mean(wide**2, [-1], keepdim=True).add(self.eps))
        return (wide * rstd).to(dtype) * self.weight


class Power(Norm):
    def forward(self, x):
        y = torch.pow(x.float(), 2).mean((-1,), True) + self.eps
        return torch.mul(x.float() * y.pow(-0.5), 1 + self.weight.float()).to(x.dtype)


class Literal(Norm):
    def forward(self, x):
        y = x.float()
        return (y * (1e-3 + y.pow(2).mean(-1, keepdim=True)).rsqrt()).to(x.dtype) * self.weight


class Helpers(Norm):
    def _norm(self, x, eps):
        return x * torch.rsqrt(self._square(x).mean(-1, keepdim=True) + eps)

    def _square(self, x):
        return x.pow(2)

    def forward(self, x):
        return self._norm(x.float(), self.eps).type_as(x) * self.weight


class Optional_(Norm):
    """Diffusers' way: weight and bias may be None."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                hidden_states = hidden_states.to(self.weight.dtype)
            hidden_states = hidden_states * self.weight
            if self.bias is not None:
                hidden_states = hidden_states + self.bias
        else:
            hidden_states = hidden_states.to(input_dtype)
        return hidden_states


class NoWeight(Unweighted):
    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Flags(Unweighted):
    """xLSTM's way."""

    def forward(self, x):
        dtype = x.dtype
        if self.force:
            x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=self.dim, keepdim=True) + self.eps)
        return x.to(dtype) if not self.with_scale else x.to(dtype) * self.scale


class TrainingIsRead(Unweighted):
    def forward(self, x):
        if self.training:
            y = x.float()
        else:
            y = x.to(torch.float32)
        return (y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


class Sub(nn.RMSNorm):
    """A torch.nn.RMSNorm in name."""

    def forward(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


class OfChannels(Unweighted):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)


class OfChannelsWeighted(Norm):
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + self.eps)
        return (y * self.weight[:, None, None]).to(x.dtype)


class OfChannelsViewed(Norm):
    def forward(self, x):
        y = x / torch.sqrt(x.square().mean(dim=1, keepdim=True) + self.eps)
        return y * self.weight.view(1, -1, 1, 1)


class OfChannelsOffset(Norm):
    shape = (C, 1, 1)

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class OfTheThirdLast(Norm):
    shape = (C, 1, 1)

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-3, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


LAST = (Squared, Times, Reciprocal, Power, Literal, Helpers, Optional_, NoWeight, Flags, TrainingIsRead)
CHANNELS = (OfChannels, OfChannelsWeighted, OfChannelsViewed, OfChannelsOffset, OfTheThirdLast)


def made(cls: type[nn.Module]) -> nn.Module:
    return randomised(Sub(C) if cls is Sub else cls())


def shape_for(cls: type[nn.Module]) -> tuple[int, ...]:
    return (4, C, 3, 5) if cls in CHANNELS else (4, 5, C)


def check(module: nn.Module, x: Tensor, calls: Calls, served: bool = True) -> nn.Module:
    """Swap, prove, and compare with the original; whether our op ran must be as ``served`` says."""
    swapped = normswap.optimize(module.eval(), x, validate="grad")
    row = normswap.report(swapped).rows[0]
    assert (row["kind"], row["status"]) == ("rms_norm", "wiring"), row
    before = calls.count
    assert_same(swapped(x), module(x), x.dtype)
    assert (calls.count > before) == served
    cotangent = torch.randn_like(module(x))
    for ours, theirs in zip(gradients(swapped, x, cotangent), gradients(module, x, cotangent), strict=True):
        assert_same(ours, theirs, x.dtype)
    return swapped


@pytest.mark.case("rms-cast-orders", "dtypes", "training-branches")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [*LAST, *CHANNELS, Sub], ids=lambda c: c.__name__)
def test_every_spelling_is_swapped_and_equal(cls: type[nn.Module], dtype: torch.dtype, calls: Calls) -> None:
    narrow = cls in (OfChannels, OfChannelsViewed, Sub) and dtype is not torch.float32  # they square in 16 bits
    check(made(cls).to(dtype), torch.randn(shape_for(cls)).to(dtype) * 2, calls, not narrow)


@pytest.mark.case("mixed-weights")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("cls", [Squared, Power, OfChannelsWeighted, Times, Optional_], ids=lambda c: c.__name__)
def test_float32_weights_with_16_bit_inputs(cls: type[nn.Module], dtype: torch.dtype, calls: Calls) -> None:
    check(made(cls), torch.randn(shape_for(cls)).to(dtype), calls, cls not in (Times, Optional_))


@pytest.mark.case("float64")
@pytest.mark.parametrize("cls", [Squared, Times, OfChannelsViewed], ids=lambda c: c.__name__)
def test_float64_runs_the_original(cls: type[nn.Module], calls: Calls) -> None:
    module, x = made(cls).double(), torch.randn(shape_for(cls)).double()
    swapped = normswap.optimize(module, x)
    assert torch.equal(swapped(x), module(x)) and calls.count == 0


@pytest.mark.case("no-affine")
def test_a_weight_of_none(calls: Calls) -> None:
    module = Optional_()
    module.register_parameter("weight", None)
    swapped = check(module, torch.randn(3, C).half(), calls)
    swapped.weight = nn.Parameter(torch.randn(C).half())
    module.weight = swapped.weight
    assert_same(swapped(x := torch.randn(3, C).half()), module(x), x.dtype)


@pytest.mark.case("offset-mean", "empty-batch", "one-element", "zero-rows", "non-finite-rows", "large-values")
@pytest.mark.parametrize("cls", [Times, Power, OfChannelsWeighted], ids=lambda c: c.__name__)
def test_values(cls: type[nn.Module], calls: Calls) -> None:
    module = made(cls)
    swapped = normswap.optimize(module, torch.randn(shape_for(cls)))
    shape = shape_for(cls)
    bad = torch.randn(shape)
    bad[0, 0], bad[1, 0] = torch.nan, torch.inf
    for x in (
        torch.randn(shape) + 1000,
        torch.zeros(shape),
        torch.randn(shape) * 1e30,
        torch.randn((0, *shape[1:])),
        bad,
    ):
        torch.testing.assert_close(swapped(x), module(x), equal_nan=True)
    assert calls.count > 5


@pytest.mark.case("strided-input", "channels-last", "output-strides", "strided-gradient", "never-writes-input")
@pytest.mark.parametrize("cls", [Squared, Times, OfChannelsWeighted, OfChannelsOffset], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
        lambda x: x.transpose(-1, 1).contiguous().transpose(-1, 1),
        lambda x: torch.cat([x, x], -2)[..., : x.shape[-2], :],
        lambda x: torch.cat([x, x], 0).transpose(0, 1).contiguous().transpose(0, 1)[::2],
        lambda x: x[:1].expand(7, *x.shape[1:]),
        lambda x: x[:1],
    ],
    ids=["swapped", "last", "sliced", "strided", "expanded", "one"],
)
def test_strides_are_the_originals(cls: type[nn.Module], layout: Any, calls: Calls) -> None:
    x = layout(torch.randn(shape_for(cls)))
    before = x.clone()
    swapped = check(made(cls), x, calls)
    out = swapped(leaf := x.detach().clone(memory_format=torch.preserve_format).requires_grad_())
    out.sum().backward()
    assert leaf.grad is not None and torch.equal(x, before)


# --- look-alikes --------------------------------------------------------------------------------------------------


class Config:
    eps = 1e-5


GLOBAL_EPS = 1e-5


class ReturnsRstd(Norm):
    def forward(self, x):
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Gated(Norm):
    def forward(self, x, gate=None):
        x = x * F.silu(gate)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SelfGated(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y * F.silu(x)


class NoGrad(Norm):
    def forward(self, x):
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * r * self.weight


class AutocastOff(Norm):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GradQuery(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y * self.weight if torch.is_grad_enabled() else y


class GradNumber(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps + torch.is_grad_enabled()) * self.weight


class ReadsConfig(Norm):
    config = Config()

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps) * self.weight


class ReadsGlobal(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + GLOBAL_EPS) * self.weight


class AsksForType(Norm):
    def forward(self, x):
        if isinstance(x, nn.Parameter):
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ShapeAfterInPlace(Norm):
    def forward(self, x):
        x.unsqueeze_(0)
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.eps) * self.weight


class InPlace(Norm):
    def forward(self, x):
        x *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight


class Sum(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class EpsOutside(Norm):
    def forward(self, x):
        return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps) * self.weight


class NoKeepdim(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1) + self.eps) * self.weight


class TwoDims(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps) * self.weight


class OtherDim(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight


class Partial(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x[..., :3].pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OtherTensor(Norm):
    def forward(self, x):
        return self.weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class TwiceTheEps(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps) * self.weight


class WeightTwice(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight)


class Biased(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + 1


class Cubed(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) ** 3 * self.weight


class Widened(Norm):
    def forward(self, x):
        return x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DataDependent(Norm):
    def forward(self, x):
        if x.max() > 0:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class SideEffect(Norm):
    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        self.seen = variance
        return x * torch.rsqrt(variance + self.eps) * self.weight


class Starred(Norm):
    def forward(self, *args):
        return args[0] * torch.rsqrt(args[0].pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class KeywordOnly(Norm):
    def forward(self, x, *, scale=1.0):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * scale


class Defaulted(Norm):
    def forward(self, x=None):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DifferentInTraining(Norm):
    def forward(self, x):
        if self.training:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Recursive(Norm):
    def forward(self, x):
        return self.forward(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ToADevice(Norm):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.to("cpu")


class Property(Norm):
    @property
    def epsilon(self):
        return self.eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weight


class Scalar(Norm):
    shape = (1,)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Child(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight)


class Closed(Norm):
    def forward(self, x):
        return super().__getattr__("weight") * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Decorated(Norm):
    @torch.no_grad()
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


LOOK_ALIKES = [
    *((ReturnsRstd, Reason.UNSUPPORTED, "another function"), (Gated, Reason.UNSUPPORTED, "gate")),
    *((SelfGated, Reason.PART_OF_FORWARD, "silu"), (NoGrad, Reason.NOT_STRAIGHT_LINE, "with block")),
    *((AutocastOff, Reason.NOT_STRAIGHT_LINE, "with block"), (GradQuery, Reason.NOT_STRAIGHT_LINE, "grad")),
    *((GradNumber, Reason.PART_OF_FORWARD, "is_grad_enabled"), (ReadsConfig, Reason.PART_OF_FORWARD, ".eps")),
    *((ReadsGlobal, Reason.NOT_STRAIGHT_LINE, "GLOBAL_EPS"), (AsksForType, Reason.NOT_STRAIGHT_LINE, "isinstance")),
    *((ShapeAfterInPlace, Reason.NOT_STRAIGHT_LINE, "not used"), (InPlace, Reason.NOT_STRAIGHT_LINE, "in-place")),
    *((Sum, Reason.PART_OF_FORWARD, "sum"), (EpsOutside, Reason.UNSUPPORTED, "another function")),
    *((NoKeepdim, Reason.UNSUPPORTED, "keepdim=False"), (TwoDims, Reason.UNSUPPORTED, "dim=[-2, -1]")),
    *((OtherDim, Reason.UNSUPPORTED, "not one value per index"), (Partial, Reason.NOT_STRAIGHT_LINE, "part of")),
    *((OtherTensor, Reason.UNSUPPORTED, "another function"), (TwiceTheEps, Reason.UNSUPPORTED, "attribute's value")),
    *((WeightTwice, Reason.UNSUPPORTED, "another function"), (Biased, Reason.UNSUPPORTED, "another function")),
    *((Cubed, Reason.UNSUPPORTED, "another function"), (Widened, Reason.PART_OF_FORWARD, "double")),
    *((DataDependent, Reason.NOT_STRAIGHT_LINE, "x.max()"), (SideEffect, Reason.NOT_STRAIGHT_LINE, "self.seen")),
    *((Starred, Reason.UNSUPPORTED, "args"), (KeywordOnly, Reason.UNSUPPORTED, "scale")),
    *((Defaulted, Reason.UNSUPPORTED, "None"), (DifferentInTraining, Reason.UNSUPPORTED, "another function")),
    *((Recursive, Reason.NOT_STRAIGHT_LINE, "itself"), (ToADevice, Reason.TRACE, "device")),
    *((Property, Reason.UNSUPPORTED, "self.epsilon"), (Scalar, Reason.UNSUPPORTED, "not one value per index")),
    *((Child, Reason.PART_OF_FORWARD, "self.act"), (Closed, Reason.NOT_STRAIGHT_LINE, "closes over")),
    (Decorated, Reason.NOT_STRAIGHT_LINE, "decorator"),
]


@pytest.mark.case("trap-no-grad-block", "trap-autocast-block", "trap-grad-query", "trap-config-and-globals")
@pytest.mark.case(
    "trap-isinstance", "trap-shape-after-in-place", "trap-returns-rstd", "training-branches", "signatures"
)
@pytest.mark.case(
    "other-dim", "other-tensor", "sum-not-mean", "added-eps", "data-dependent-control-flow", "side-effects"
)
@pytest.mark.case("in-place-and-aliases")
@pytest.mark.parametrize(("cls", "reason", "word"), LOOK_ALIKES, ids=lambda v: getattr(v, "__name__", ""))
def test_look_alikes_are_refused(cls: type[nn.Module], reason: Reason, word: str) -> None:
    answer = rules.find(cls())
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == ("rms_norm", reason), answer
    assert word in answer.detail


class HandLayerNorm(Norm):
    def forward(self, x):
        u = x - x.mean(-1, keepdim=True)
        return u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class FrozenBatchNorm(Norm):
    def forward(self, x):
        return x * (self.weight + self.eps).rsqrt()


class Loss(nn.Module):
    def forward(self, x, y):
        return torch.sqrt(((x - y) ** 2).mean())


@pytest.mark.parametrize("cls", [HandLayerNorm, FrozenBatchNorm, Loss])
def test_other_functions_are_not_spoken_of(cls: type[nn.Module]) -> None:
    assert rules.find(cls()) is None
