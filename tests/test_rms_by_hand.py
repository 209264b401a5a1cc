"""RMSNorms written by hand: every spelling that is swapped and every look-alike that is not."""

from __future__ import annotations

from typing import Any

import pytest
import region_checks
import torch
from models import randomised
from rms_look_alikes import LOOK_ALIKES, FrozenBatchNorm, Gated, HandLayerNorm, Loss, RootOfSize, Sized
from rms_models import (
    CHANNELS,
    DTYPES,
    LAST,
    NARROW,
    SIZE,
    C,
    Calls,
    Flags,
    Helpers,
    NoEps,
    NoWeight,
    OfChannelsOffset,
    OfChannelsViewed,
    OfChannelsWeighted,
    Optional_,
    Power,
    Squared,
    Sub,
    Times,
    assert_same,
    check,
    made,
    shape_for,
)
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

import normswap
from normswap import rules
from normswap.plans import Match, Reason, Refusal


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.case("rms-cast-orders", "dtypes", "training-branches")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [*LAST, *CHANNELS, Sub], ids=lambda c: c.__name__)
def test_every_spelling_is_swapped_and_equal(cls: type[nn.Module], dtype: torch.dtype, calls: Calls) -> None:
    served = cls not in NARROW or dtype is torch.float32
    check(made(cls).to(dtype), torch.randn(shape_for(cls)).to(dtype) * 2, calls, served)


class AsksForEps(NoWeight):
    """A branch goes by what is read where the norm needs a number."""

    def __init__(self) -> None:
        super().__init__()
        self.eps: Any = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.eps is None:
            return x
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


WEIGHTED = "float32*float32 float16*float16 bfloat16*bfloat16"
ANY_WEIGHT = "float32*float32 float16*float16 float16*float32 bfloat16*bfloat16 bfloat16*float32"


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (NoWeight, {"dim": -1, "eps": "eps", "dtypes": "float32 float16 bfloat16"}),
        (NoEps, {"dim": -1, "eps": 0.0, "dtypes": WEIGHTED, "weight": "weight", "cast_before_weight": True}),
        (
            Power,
            {"dim": -1, "eps": "eps", "dtypes": ANY_WEIGHT, "weight": "weight", "cast_before_weight": False}
            | {"weight_offset": 1},
        ),
        (
            OfChannelsWeighted,
            {"dim": 1, "eps": "eps", "dtypes": ANY_WEIGHT, "weight": "weight", "cast_before_weight": False}
            | {"weight_axis": -3, "weight_rank": 3},
        ),
        (
            Flags,
            {"dim": -1, "eps": "eps", "dtypes": "float32 float16 bfloat16"}
            | {"self.force": True, "self.dim": -1, "self.with_scale": False},
        ),
        (
            AsksForEps,
            {"dim": -1, "eps": 1e-5, "dtypes": "float32 float16 bfloat16", "self.eps": 1e-5},
        ),
        (
            Helpers,
            {"dim": -1, "eps": "eps", "dtypes": WEIGHTED, "weight": "weight", "cast_before_weight": True}
            | {"methods": "_norm _square"},
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_a_match_says(cls: type[nn.Module], expected: dict[str, Any]) -> None:
    match = rules.alone(made(cls))
    assert isinstance(match, Match)
    assert {key: value for key, value in match.attributes.items() if key != "source"} == expected
    assert len(match.attributes["source"]) == 16


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
    module = Optional_().eval()
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_are_the_originals(cls: type[nn.Module], layout: Any, dtype: torch.dtype, calls: Calls) -> None:
    x = layout(torch.randn(shape_for(cls)).to(dtype))
    before = x.clone()
    swapped = check(made(cls).to(dtype), x, calls, served=0 not in x.stride())
    out = swapped(leaf := x.detach().clone(memory_format=torch.preserve_format).requires_grad_())
    out.sum().backward()
    assert leaf.grad is not None and torch.equal(x, before)


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
    answer = rules.alone(cls())
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == ("rms_norm", reason), answer
    assert word in answer.detail


@pytest.mark.parametrize("cls", [row[0] for row in LOOK_ALIKES], ids=lambda v: v.__name__)
def test_a_region_of_a_look_alike_computes_what_it_did(cls: type[nn.Module]) -> None:
    model = randomised(cls()).eval()
    inputs = tuple(torch.randn(3, 4, SIZE) for _ in range(2 if cls is Gated else 1))
    region_checks.assert_same(region_checks.swap(model), model, inputs, False)


@pytest.mark.parametrize("cls", [HandLayerNorm, FrozenBatchNorm, Loss, Sized, RootOfSize])
def test_other_functions_are_not_spoken_of(cls: type[nn.Module]) -> None:
    assert rules.alone(cls()) is None


class LazyTimes(LazyModuleMixin, Times):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x: torch.Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize(x.shape[-1:])  # type: ignore[union-attr]


def test_a_lazy_one_is_refused_until_its_first_input() -> None:
    module = LazyTimes()
    assert rules.alone(module) == Refusal("rms_norm", Reason.LAZY)
    module(torch.randn(2, C))
    assert isinstance(rules.alone(module), Match)


@pytest.mark.parametrize(
    ("statistic", "reason"),
    [("torch.rsqrt(x.pow(2).mean(-1, True))", Reason.SOURCE), ("x.mean(-1, True)", None), ("torch.rsqrt(x)", None)],
)
def test_without_a_source_the_names_say_whether_it_is_spoken_of(statistic: str, reason: Reason | None) -> None:
    found: dict[str, Any] = {"torch": torch}
    exec(f"def forward(self, x):\n    return x * {statistic}", found)
    answer = rules.alone(type("Written", (nn.Module,), {"forward": found["forward"]})())
    assert (answer and answer.reason) is reason  # type: ignore[union-attr]
