"""What else only a condition of its own decides: each test here fails when one is dropped or weakened."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casts_models import made
from convolution_cases import ending
from convolution_models import IMAGE, drawn, swapped_with
from fake_gpu import norms, optimized
from models import Projection, randomised
from norm_act_models import NormAct
from region_checks import IMAGES, ROWS, Parts, swap
from torch import Tensor, nn

import normswap
from normswap import modules, rules
from normswap.activation import NONE, Activation
from normswap.kinds import KINDS
from normswap.plans import Reason, Refusal
from normswap.timing.candidates import Candidate
from normswap.timing.clock import Cost
from normswap.timing.model import Waiting

# --- what is spoken of ------------------------------------------------------------------------------------------------


def without_source(body: str) -> nn.Module:
    """A module whose forward stands in no file."""
    found: dict[str, Any] = {"torch": torch}
    exec(f"def forward(self, x):\n    return {body}", found)
    return type("Unread", (nn.Module,), {"forward": found["forward"]})()


@pytest.mark.parametrize(
    ("body", "spoken"),
    [
        ("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)", True),
        ("x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)", False),
        ("x * x.pow(2).mean(-1, keepdim=True)", False),
        ("x * torch.rsqrt(x.pow(2) + 1e-6)", False),
    ],
)
def test_an_rms_norm_by_hand_without_a_source_is_spoken_of(body: str, spoken: bool) -> None:
    refused = normswap.plan(nn.Sequential(without_source(body))).refused
    assert (("rms_norm", Reason.SOURCE) in [(r.refusal.kind, r.refusal.reason) for r in refused]) == spoken


@pytest.mark.parametrize(("divisor", "spoken"), [("x.abs().mean(-1, True)", True), ("x.mean(-1, True)", False)])
def test_an_l1_norm_without_a_source_is_spoken_of(divisor: str, spoken: bool) -> None:
    refused = normswap.plan(nn.Sequential(without_source(f"x / {divisor}"))).refused
    assert (("l1_norm", Reason.SOURCE) in [(r.refusal.kind, r.refusal.reason) for r in refused]) == spoken


class Builtin(nn.Module):
    forward = torch.neg  # type: ignore[assignment]


def test_a_child_whose_forward_is_no_python_function_stands_between() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Builtin(), nn.BatchNorm1d(4))
    assert [swap.match.kind for swap in normswap.plan(model).swaps] == ["batch_norm"]


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_only_a_linear_itself_is_taken_over() -> None:
    with pytest.raises(TypeError, match="got Half and BatchNorm1d"):
        modules.LinearScaleBatchNorm.from_torch(Half(3, 4), torch.ones(4), nn.BatchNorm1d(4))


class RootIf(nn.Module):
    """An RMSNorm where ``of`` is true."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class IfPositive(RootIf):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() + 1:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x


class IfTensor(RootIf):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x


class IfType(RootIf):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x


@pytest.mark.parametrize("cls", (IfPositive, IfTensor, IfType))
def test_a_branch_on_values_is_no_whole_norm(cls: type[nn.Module]) -> None:
    assert isinstance(rules.alone(cls()), Refusal)


class Calls(RootIf):
    """``scaled`` is a method that stands in no file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) * self.weight


Calls.scaled = type(without_source("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)")).forward


def test_a_method_without_a_source_is_not_read() -> None:
    answer = rules.alone(Calls())
    assert isinstance(answer, Refusal) and answer.reason is Reason.SOURCE


# --- what is compared -------------------------------------------------------------------------------------------------


def test_layers_of_rows_are_not_compared_on_images() -> None:
    """A Linear's output of three dims, whose second are the BatchNorm's channels, runs the original."""
    model = randomised(Projection(12, 12)).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(5, 12, 12), validate="grad", min_speedup=None))
    assert {row["detail"] for row in report.rows} == {"the region's own statements run on these inputs"}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_sum_that_is_rounded_is_normalised_as_rounded(dtype: torch.dtype) -> None:
    """Between numbers of 1000 in bfloat16 lie steps of 4: the proof's own result is of the rounded sum."""
    model = randomised(Sum()).to(dtype).eval()
    x, y = (torch.randn(ROWS) + 1000).to(dtype), torch.randn(ROWS).to(dtype)
    report = normswap.report(normswap.optimize(model, (x, y), min_speedup=None))
    (row,) = [row for row in report.rows if row["name"] == ""]
    assert (row["status"], row["detail"]) == ("wiring", "") and row["eager_error_share"] < 1


def test_what_is_drawn_for_a_region_that_no_run_reaches_is_of_its_dtype() -> None:
    model = nn.ModuleDict({"block": Sum(), "lin": nn.Linear(4, 4)}).eval()
    model.forward = lambda x: model["lin"](x)  # type: ignore[method-assign]
    model["block"].bfloat16()
    report = normswap.report(normswap.optimize(model, torch.randn(2, 4), min_speedup=None))
    (row,) = [row for row in report.rows if row["name"] == "block"]
    assert (row["inputs"], row["dtype"]) == ("synthesised", "bfloat16")


# --- what a call goes by ----------------------------------------------------------------------------------------------


class Sum(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x + y)


class Unit(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Whole(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x / torch.linalg.norm(x)


class Convolved(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Residual(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.gn(x) + y)


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("cls", (Sum, Unit, Whole, Convolved, Residual))
def test_a_meta_tensor_that_knows_no_autocast(cls: type[nn.Module], dtype: torch.dtype, autocast: bool) -> None:
    model = cls().to(dtype).eval()
    swapped, x = swap(model).to("meta"), torch.empty(ROWS if cls is Sum else IMAGES, dtype=dtype, device="meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        ours, theirs = swapped(x, x), model.to("meta")(x, x)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("later", (False, True))
def test_what_autocast_would_round_on_a_device_without_it(later: bool) -> None:
    model, x = made("block")
    with torch.autocast("cpu", torch.bfloat16):
        swapped = swap(model).to("meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=later):
        assert swapped(x.to("meta")).dtype is model.to("meta")(x.to("meta")).dtype


@pytest.mark.parametrize("norm", ("l2_norm", "frobenius_norm"))
def test_a_norm_that_autocast_makes_float32_is_left_to_the_statements(norm: str) -> None:
    """As on a GPU, where a product of 16 bits with it is float32."""
    call, x = KINDS[norm].call, torch.randn(ROWS)
    given = () if norm == "frobenius_norm" else (-1, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x.bfloat16(), *given) is None and call(x, *given) is not None
    assert call(x.bfloat16(), *given) is not None


class Adaptive(Parts):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale) + shift


class AdaptiveRoot(Parts):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.rms(x) * (1 + scale) + shift


@pytest.mark.parametrize(("cls", "kind"), ((Adaptive, "layer_norm"), (AdaptiveRoot, "rms_norm")))
def test_a_scale_of_another_dtype_is_left_to_pytorch(
    cls: type[nn.Module], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product is of the wider dtype."""
    asked: list[torch.dtype] = []
    file: Any = importlib.import_module(f"normswap.kinds.{kind}")
    monkeypatch.setattr(file, f"{kind}_directly", lambda x, *given: asked.append(x.dtype))
    model = randomised(cls()).bfloat16()
    swapped, x, one = swap(model), torch.randn(ROWS).bfloat16(), torch.randn(2, 1, ROWS[-1])
    for scale, shift, count in ((one, one, 0), (one.bfloat16(), one, 0), (one.bfloat16(), one.bfloat16(), 1)):
        ours, theirs = swapped(x, scale, shift), model(x, scale, shift)
        assert len(asked) == count and ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)  # ours rounds once


@pytest.mark.parametrize(
    ("kind", "given"), (("layer_norm", ((8,), None, None, 1e-5)), ("rms_norm", ((8,), None, 1e-5)))
)
def test_a_norm_with_nothing_around_it_has_its_own_op(
    kind: str, given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    file: Any = importlib.import_module(f"normswap.kinds.{kind}")
    monkeypatch.setattr(file, f"{kind}_directly", lambda *given: asked.append(kind))
    x = torch.randn(2, 8)
    for before, activation in ((None, NONE), (None, Activation("relu")), (x, NONE)):
        file.fused(x, given, before, None, None, None, activation, None)
    assert len(asked) == 2


def test_a_number_is_compared_and_left_to_the_statements() -> None:
    model = Whole().eval()
    x = torch.tensor(3.0)
    report = normswap.report(normswap.optimize(model, (x, x), min_speedup=None))
    (row,) = [row for row in report.rows if row["name"] == ""]
    assert row["detail"] == "the region's own statements run on these inputs"


# --- what is chosen ---------------------------------------------------------------------------------------------------


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.unused = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x))


def test_a_norm_that_no_run_calls_has_no_times() -> None:
    report = normswap.report(optimized(Uncalled().eval(), torch.randn(4, 8), norms((30.0, 10.0))))
    assert {row["name"]: "gain" in row for row in report.rows} == {"norm": True, "unused": False}
    assert set(report.swapped) == {"norm", "unused"}


@pytest.mark.parametrize("ours", (0.0, -1.0))
def test_a_clock_that_shows_no_time_at_all_tells_nothing(ours: float) -> None:
    costs = Cost(100.0, 10.0), Cost(ours, 10.0)
    assert Candidate("a", (), frozenset(), 1, *costs).gain(Waiting(900.0, 300.0)) == 1.0


# --- what changes later, and what cannot be told in the dtype ---------------------------------------------------------


def test_a_class_that_is_written_anew_behind_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = drawn(ending(NormAct)), torch.randn(IMAGE)
    fast = swapped_with(model, "folded")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        monkeypatch.setattr(NormAct, "forward", lambda self, x: 3 * x)
        assert torch.equal(fast(x), model(x))


def test_a_weight_alone_that_leaves_the_range_is_not_folded() -> None:
    pairs = [layer for _ in range(2) for layer in (nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))]
    model = randomised(nn.Sequential(*pairs)).eval()
    bn: Any = model[1]
    with torch.no_grad():
        bn.running_mean.zero_()
        bn.running_var.fill_(1e-12)
        bn.weight.fill_(1e37)
        model[0].weight.fill_(1.0)
    with pytest.warns(UserWarning, match="not finite in float32"):
        folded = normswap.fold(model)
    assert [type(child) for child in folded.children()].count(nn.BatchNorm1d) == 1


def test_what_is_told_of_a_pair_that_is_not_folded_names_its_place() -> None:
    model = nn.ModuleDict({"deep": Convolved(), "fine": Convolved()}).eval()
    deep: Any = model["deep"]
    with torch.no_grad():
        deep.bn.running_var.fill_(1e-12)
        deep.bn.weight.fill_(1e37)
        deep.conv.weight.fill_(1.0)
    with pytest.warns(UserWarning, match=r"fold: deep\.bn is left as it is: .*not finite"):
        normswap.fold(model)
