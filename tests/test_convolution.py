"""Convolution -> BatchNorm -> residual -> activation in eval, on a CPU: found, folded on every call, proved."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_cases import CASES, PROVED, Case
from convolution_models import (
    Block,
    bn,
    conv,
    drawn,
    regions_in,
    residual,
    swapped_with,
    undecided,
    without_activation,
    written,
)
from convolution_stand_in import stand_in  # noqa: F401
from torch import Tensor, nn

import normswap
from normswap import ops, reference
from normswap.activation import Activation
from normswap.ops import dispatch
from normswap.plan import Plan
from normswap.regions import convolution_error
from normswap.regions.convolution import direct_way
from normswap.regions.convolution_error import times_pytorchs
from normswap.regions.install import compiled_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of values about 1 to 10: some roundings of the dtype. The tight bound is the proof's."""


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was folded so far."""
    seen: list[str] = []
    real = ops.convolution_batch_norm_eval
    monkeypatch.setattr(ops, "convolution_batch_norm_eval", lambda *a, **k: seen.append(k["folding"]) or real(*a, **k))
    return seen


def outcome(model: nn.Module, x: Tensor, learning: bool = False) -> Any:
    """The output and gradients by name, or what is raised."""
    x = x.clone().requires_grad_(learning)
    model.zero_grad()
    torch.manual_seed(1)
    try:
        with torch.set_grad_enabled(learning):
            out = model(x)
            if not (learning and out.requires_grad):
                return out.detach(), {}
            out.backward(torch.cos(torch.arange(out.numel()).to(out)).view(out.shape))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    gradients = {"input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return out.detach(), {name: g for name, g in gradients.items() if g is not None}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_computes_what_it_did(name: str, folds: list[str]) -> None:
    case: Case = CASES[name]
    model = drawn(case.make)
    plan = undecided(model)
    if "shared" not in name:
        assert tuple(region.name for region in regions_in(plan)) == case.found
    told = [region.apart for region in regions_in(plan) if region.apart]
    assert all(reason.startswith(case.apart) for reason in told) and bool(told) == bool(case.apart)
    x = torch.randn(case.shape).contiguous(memory_format=case.layout).to(case.dtype)
    fast = normswap.apply(drawn(case.make), plan, inplace=True)
    for one in (model, fast) if case.later is None else ():
        one.to(case.dtype)
    for one in (model, fast) if case.later is not None else ():
        torch.manual_seed(2)
        case.later(one)
    before = {key: value.clone() for key, value in fast.state_dict().items()}
    folds.clear()
    ours, theirs = outcome(fast, x), outcome(model, x)
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert folds == ["folded"] * case.folds
    assert ours[0].dtype is theirs[0].dtype and ours[0].stride() == theirs[0].stride()
    tolerance = 0.0 if case.exact else TOLERANCE[case.dtype]
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=10 * tolerance)
    if case.exact or not model.training:
        assert all(torch.equal(value, before[key]) for key, value in fast.state_dict().items()) or model.training


@pytest.mark.parametrize("name", CASES)
def test_where_gradients_are_asked_for_the_statements_run(name: str, folds: list[str]) -> None:
    case = CASES[name]
    model, fast = (drawn(case.make).to(case.dtype) for _ in range(2))
    normswap.apply(fast, undecided(model), inplace=True)
    x = torch.randn(case.shape).to(case.dtype)
    folds.clear()
    ours, theirs = outcome(fast, x, learning=True), outcome(model, x, learning=True)
    assert folds == [] and type(ours) is type(theirs)
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert torch.equal(ours[0], theirs[0]) and ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(gradient, theirs[1][name]) for name, gradient in ours[1].items())


@pytest.mark.parametrize("name", PROVED)
def test_what_is_folded_is_proved(name: str) -> None:
    case = CASES[name]
    model = drawn(case.make).to(case.dtype)
    fast = swapped_with(model)
    for inputs in ((torch.randn(case.shape).to(case.dtype),), ()):
        rows = normswap.validate(fast, *inputs, mode="forward").rows
        assert rows and all(row["status"] == "wiring" and row["error_share"] <= 1.0 for row in rows), rows


@pytest.mark.parametrize("activation", ("none", "relu", "silu"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_op_is_the_composition(activation: str, dtype: torch.dtype) -> None:
    model, x = drawn(lambda: Block(conv(8, groups=2), nn.BatchNorm2d(8))).to(dtype), torch.randn(3, 6, 7, 5).to(dtype)
    c, b = model.conv, model.bn
    added = torch.randn(3, 8, 7, 5).to(dtype)
    how = (c.weight, c.bias, c.stride, c.padding, c.dilation, c.groups, b.running_mean, b.running_var)
    act = Activation(activation)
    with torch.no_grad():
        ours = ops.convolution_batch_norm_eval(x, *how, b.weight, b.bias, b.eps, act, residual=added)
        expected = act(copy.deepcopy(b).double()(copy.deepcopy(c).double()(x.double())) + added.double())
        theirs = act(b(c(x)) + added)
    assert ours.dtype is dtype and times_pytorchs(ours, theirs, expected) < 1.5


def test_the_fold_is_rounded_once() -> None:
    weight, values = torch.randn(5, 3, 2, 2), [torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)]
    wide = reference.fold_scale_batch_norm(
        weight.double(), torch.ones(5).double(), None, *(v.double() for v in values), 1e-3
    )
    lower = [t.to(torch.bfloat16) for t in (weight, torch.ones(5))]
    folded = reference.fold_scale_batch_norm(*lower, None, *values, 1e-3)
    expected = reference.fold_scale_batch_norm(*(t.double() for t in lower), None, *(v.double() for v in values), 1e-3)
    for ours, exact in zip(folded, expected, strict=True):
        assert ours.dtype is torch.bfloat16 and torch.equal(ours, exact.float().to(torch.bfloat16))
    gain = (values[1].double() + 1e-3).rsqrt() * values[2].double()
    torch.testing.assert_close(wide[0], weight.double() * gain[:, None, None, None])


def test_by_default_only_what_cudnn_fuses_is_taken_in() -> None:
    made = {
        "conv + bn + relu": nn.Sequential(conv(), bn(), nn.ReLU()),
        "1 + 2": nn.Sequential(conv(groups=3), bn(), nn.ReLU()),
        "1 + 2 ": nn.Sequential(conv(), bn(), nn.SiLU()),
        "1 + 2  ": nn.Sequential(nn.Conv3d(6, 6, 1), nn.BatchNorm3d(6), nn.ReLU()),
    }
    found = [[(r.name, r.folding) for r in regions_in(normswap.plan(model.eval()))] for model in made.values()]
    assert found == [[("0 + 1 + 2", "fused")], [("1 + 2", "")], [("1 + 2", "")], [("1 + 2", "")]]
    assert normswap.plan(nn.Sequential(conv(), bn()).eval()).swaps == ()
    training = normswap.plan(nn.Sequential(conv(), bn(), nn.ReLU()))
    assert [(r.name, r.folding) for r in regions_in(training)] == [("1 + 2", "")]


def test_on_a_cpu_the_default_plan_gives_the_same_bits(folds: list[str]) -> None:
    model, x = drawn(lambda: written(residual)(conv(), bn())), torch.randn(2, 6, 9, 8)
    fast = normswap.apply(model, normswap.plan(model))
    assert [region.folding for region in regions_in(normswap.plan(model))] == ["fused"]
    with torch.no_grad():
        assert torch.equal(fast(x), model(x)) and folds == []


def test_a_plan_is_data() -> None:
    model, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    plan = undecided(model)
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    with torch.no_grad():
        assert torch.equal(normswap.apply(model, again)(x), normswap.apply(model, plan)(x))


def test_plans_of_before_have_no_convolutions() -> None:
    model = drawn(lambda: Block(conv(groups=3), bn()))
    text = normswap.plan(model).to_json()
    data = [line for line in text.splitlines() if '"convolution"' not in line and '"folding"' not in line]
    old = Plan.from_json("\n".join(data).replace('"conditions": [],', '"conditions": [],'))
    assert [swap.match.kind for swap in normswap.apply(model, old) and old.swaps] == ["region"]


LOWERED = [name for name in PROVED if CASES[name].dtype is torch.float32]
SUMMED_IN_FLOAT32 = [name for name in LOWERED if not name.startswith("transposed")]
"""A transposed convolution in 16 bits may be rounded tap by tap on a CPU."""
by_lowered = pytest.mark.parametrize("lowered", (torch.bfloat16, torch.float16))


@by_lowered
@pytest.mark.parametrize("name", LOWERED)
def test_autocast_folds_in_float32_and_rounds_once(name: str, lowered: torch.dtype, folds: list[str]) -> None:
    case = CASES[name]
    model = drawn(case.make)
    fast = swapped_with(model)
    wide = torch.randn(case.shape).contiguous(memory_format=case.layout)
    for x in (wide, wide.to(lowered)):
        folds.clear()
        with torch.autocast("cpu", lowered):
            ours, theirs = outcome(fast, x)[0], outcome(model, x)[0]
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        added = x.dtype is not lowered and any("residual" in found for found in case.found)
        assert added or folds == ["folded"] * case.folds
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[lowered], atol=10 * TOLERANCE[lowered])


@by_lowered
@pytest.mark.parametrize("name", SUMMED_IN_FLOAT32)
def test_what_is_folded_under_autocast_is_proved(name: str, lowered: torch.dtype) -> None:
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    for inputs in ((x,), (x.to(lowered),), ()):
        with torch.autocast("cpu", lowered), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows = normswap.validate(swapped_with(model), *inputs, mode="forward").rows
        assert rows and all(row["error_share"] <= 1.0 for row in rows), rows
        # Of six channels the rounded shifts may happen to be far off.
        failed = any(row["status"] != "wiring" for row in rows)
        assert failed == any("times PyTorch's own" in str(one.message) for one in told), rows


@by_lowered
def test_under_autocast_a_weight_is_not_rounded_before_it_is_folded(lowered: torch.dtype) -> None:
    given = torch.randn(5, 3, 2, 2), torch.randn(5), torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)
    x = torch.eye(12, dtype=lowered).view(12, 3, 2, 2)  # what it gives is the weight
    how = (1, 1), (0, 0), (1, 1), 1
    with torch.autocast("cpu", lowered):
        ours = ops.convolution_batch_norm_eval(x, given[0], None, *how, *given[2:], 1e-3)
    wide = reference.fold_scale_batch_norm(given[0], None, None, *given[2:], 1e-3)
    weight, shift = (t.to(lowered).double() for t in wide)
    expected = (weight.view(5, 12).t() + shift).to(lowered)
    assert torch.equal(ours.view(12, 5), expected)


def test_what_autocast_casts_otherwise_runs_the_statements(folds: list[str]) -> None:
    model = drawn(lambda: Block(conv(), bn()))
    for made, dtype in ((copy.deepcopy(model).double(), torch.float64), (model, torch.float64)):
        fast, x = swapped_with(made), torch.randn(2, 6, 9, 8).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = outcome(fast, x), outcome(made, x)
        assert folds == []
        assert ours == theirs if isinstance(theirs, str) else torch.equal(ours[0], theirs[0])
    fast, x = swapped_with(model), torch.randn(2, 6, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = outcome(fast, x, learning=True), outcome(model, x, learning=True)
    assert folds == [] and torch.equal(ours[0], theirs[0])


@pytest.mark.usefixtures("stand_in")
def test_under_autocast_ours_scales_the_sums_of_the_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    low = torch.bfloat16
    model = drawn(lambda: written(residual)(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)))
    x, added = (torch.randn(2, 8, 9, 8).to(low) for _ in range(2))
    seen: list[Any] = []

    def native(input: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        *how, groups, mean, var, gain, offset, eps, behind, code, _, _, way = rest
        assert not torch.is_autocast_enabled("cpu") and weight.dtype is bias.dtype is input.dtype is low
        assert (groups, code, way) == (1, 1, ops.convolution.WAYS["scaled"]) and how == [1, 1, 1, 1, 1, 1]
        seen.append(input)
        z = F.conv2d(input.float(), weight.float(), bias.float(), padding=1)
        return (F.batch_norm(z, mean, var, gain, offset, False, 0.0, eps) + behind).relu().to(input.dtype)

    monkeypatch.setitem(dispatch._direct, "convolution_batch_norm_eval", native)
    c, b = model.conv, model.bn
    norm = b.running_mean, b.running_var, b.weight, b.bias, b.eps
    how = c.stride, c.padding, c.dilation, c.groups
    for given in (x, x.float()):
        with torch.no_grad(), torch.autocast("cpu", low):
            ours = ops.convolution_batch_norm_eval(
                given, c.weight, c.bias, *how, *norm, Activation("relu"), residual=added, folding="scaled"
            )
            assert torch.is_autocast_enabled("cpu")
            theirs = F.relu(b(c(given)) + added).float()
        assert ours.dtype is low
        torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.05)
    assert len(seen) == 2


@pytest.mark.usefixtures("stand_in")
def test_under_autocast_no_region_goes_the_short_way() -> None:
    model, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    way = directly(model, x)
    with torch.no_grad():
        assert way(model) is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert way(model) is None


@by_lowered
def test_autocast_of_a_model_in_16_bits(lowered: torch.dtype, folds: list[str]) -> None:
    for of_norm in (torch.float32, lowered):
        model = drawn(lambda: Block(conv(), bn())).half()
        model.bn.to(of_norm)
        fast, x = swapped_with(model), torch.randn(2, 6, 9, 8).half()
        folds.clear()
        with torch.autocast("cpu", lowered):
            ours, theirs = outcome(fast, x)[0], outcome(model, x)[0]
        assert folds == ["folded"] and ours.dtype is theirs.dtype is lowered
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)


def test_weights_of_another_dtype_than_the_norm(folds: list[str]) -> None:
    model = drawn(lambda: Block(conv(), bn()))
    model.conv.to(torch.bfloat16)
    x = torch.randn(2, 6, 9, 8).to(torch.bfloat16)
    fast = swapped_with(model)
    with torch.no_grad():
        ours, theirs = fast(x), model(x)
    assert folds == ["folded"] and ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("shape", ((6, 9, 8), (2, 5, 9, 8), (2, 6, 9), (2, 6, 1, 9, 8)))
def test_other_inputs_raise_what_they_raised(shape: tuple[int, ...]) -> None:
    model = drawn(lambda: Block(conv(), bn()))
    ours, theirs = (outcome(one, torch.randn(shape)) for one in (swapped_with(model), model))
    assert isinstance(theirs, str) and ours == theirs


def planted(monkeypatch: pytest.MonkeyPatch, change: Any, forward: Any = residual) -> Any:
    """What is swapped while the fold is wrong, and the report of its proof."""
    model, x = drawn(lambda: written(forward)(conv(), bn())), torch.randn(2, 6, 9, 8)
    fast = swapped_with(model)
    real = reference.fold_scale_batch_norm
    monkeypatch.setattr(reference, "fold_scale_batch_norm", lambda *a: change(*real(*a), *a))
    with pytest.warns(UserWarning, match="do not match"):
        return normswap.validate(fast, x, mode="forward", on_mismatch="rollback")


@pytest.mark.parametrize(
    "change",
    (
        lambda weight, bias, *given: (weight, bias - given[6]),
        lambda weight, bias, *given: (weight * (given[4] + 1e-5).sqrt()[:, None, None, None], bias),
        lambda weight, bias, *given: (weight, bias + (given[5] * given[3])),
        lambda weight, bias, *given: (weight.flip(1), bias),
        lambda weight, bias, *given: (weight * 1.0001, bias),
        lambda weight, bias, *given: (weight.to(torch.bfloat16).float(), bias),
    ),
    ids=("bias forgotten", "variance forgotten", "mean off", "channels swapped", "a little off", "rounded to bfloat16"),
)
def test_planted_faults_are_put_back(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = planted(monkeypatch, change)
    assert [row["status"] for row in report.rows] == ["failed"] and report.swapped == ()


@pytest.mark.parametrize(
    "change",
    (
        lambda weight, bias, *given: (weight, bias - given[6]),
        lambda weight, bias, *given: (weight, bias + (given[5] * given[3])),
        lambda weight, bias, *given: (weight.flip(1), bias),
        lambda weight, bias, *given: (weight * 1.03, bias),
    ),
    ids=("bias forgotten", "mean off", "channels swapped", "a little off"),
)
def test_faults_planted_under_autocast_are_put_back(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = planted(monkeypatch, change, without_activation)
    assert [row["status"] for row in report.rows] == ["failed"] and report.swapped == ()


def test_more_than_pytorchs_error_is_told_of() -> None:
    """Inputs of a large mean, weights of a channel that cancel it: what rounds a weight counts, PyTorch's own not."""
    model = drawn(lambda: Block(nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4))).to(torch.bfloat16)
    with torch.no_grad():
        model.conv.weight.copy_(torch.tensor([5.0, 3, -8, 7, 4, -11]).view(1, 6, 1, 1) / 64)
        for statistic in (model.bn.running_mean, model.bn.bias):
            statistic.zero_()
    x = (torch.randn(2, 6, 9, 8) * 0.01 + 3.0).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="times PyTorch's own"):
        report = normswap.validate(swapped_with(model), x, mode="forward")
    assert report.rows[0]["status"] == "failed"


def in_tf32(t: Tensor, cut: bool) -> Tensor:
    """``t``, of float32, with the ten bits of mantissa that TF32 has: rounded, or cut off."""
    bits = t.float().view(torch.int32) + (0 if cut else 0x1000)
    return (bits & ~0x1FFF).view(torch.float32).double()


@pytest.mark.parametrize("cut", (False, True))
def test_the_bound_of_a_convolution_in_tf32(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_error, "takes_tf32", lambda x: True)
    model, x = drawn(lambda: Block(conv(40), nn.BatchNorm2d(40))), torch.randn(16, 6, 9, 8).relu() + 1
    wide = copy.deepcopy(model).double()
    z = wide.conv(x.double())
    limit = convolution_error.folded_error(wide.conv, wide.bn, x.double(), z, torch.float32, x)
    c, b = model.conv, model.bn
    weight, bias = reference.fold_scale_batch_norm(
        c.weight, c.bias, None, b.running_mean, b.running_var, b.weight, b.bias, b.eps
    )
    for gain, within in ((1.0, True), (1.02, False)):
        given = in_tf32(x, cut), in_tf32(weight * gain, cut), bias.double()
        error = (F.conv2d(*given, padding=1) - wide.bn(z)).abs()
        assert bool((error <= limit).all()) is within, float((error / limit).max())


def test_times_pytorchs() -> None:
    expected = torch.zeros(4, dtype=torch.float64)
    one, three = torch.tensor([1.0, -1, 1, 1]), torch.tensor([3.0, 3, -3, float("nan")])
    assert times_pytorchs(three, one, expected) == pytest.approx(3.0)
    assert times_pytorchs(one, three, expected) == times_pytorchs(expected, expected, expected) == 1.0


def test_nothing_of_it_is_kept() -> None:
    model, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    fast = swapped_with(model)
    with torch.no_grad():
        first = fast(x)
        fast.bn.running_mean.add_(1.0)
        moved = fast(x)
        fast.bn.running_mean.sub_(1.0)
    assert not torch.equal(first, moved)
    assert fast.state_dict().keys() == model.state_dict().keys()


def directly(model: Any, x: Tensor, folding: str = "fused") -> Any:
    """What the short way gives for the one region of a model, None where it declines, in the same function for all."""
    (swap,) = (one for one in undecided(model, folding).swaps if not one.site.name)
    (compiled,) = compiled_of(type(model), swap.match.attributes)
    way = direct_way(compiled)
    assert way is not None
    return lambda changed: way(changed._modules, (x, x) if compiled.region.has("residual") else x)


SHORT = ("plain", "no_bias", "strided", "groups", "channels_last", "in_place", "residual", "sequential", "in_a_method")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.usefixtures("stand_in")
def test_the_short_way_is_the_same_function(name: str) -> None:
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    with torch.no_grad():
        torch.testing.assert_close(directly(model, x)(model), model(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("folding", ("fused", "matmul", "scaled"))
@pytest.mark.parametrize("name", [name for name in PROVED if CASES[name].dtype is torch.float32])
@pytest.mark.usefixtures("stand_in")
def test_no_region_gets_a_relu_that_it_has_not(name: str, folding: str) -> None:
    """Whatever its plan says."""
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    fast = swapped_with(model, folding)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-4)


LATER = [name for name, case in CASES.items() if case.later and case.dtype is torch.float32]


@pytest.mark.parametrize("name", LATER)
@pytest.mark.usefixtures("stand_in")
def test_the_short_way_sees_what_has_changed(name: str) -> None:
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    way = directly(model, x)
    case.later(model)  # type: ignore[misc]
    served = bool(case.folds) and type(model.conv) is nn.Conv2d
    with torch.no_grad():
        ours = way(model)
        if served:
            torch.testing.assert_close(ours, model(x), rtol=1e-5, atol=1e-4)
    assert (ours is not None) == served or name == "later_own_method"


class Tagged(Tensor):
    """What a library may have in a tensor's place."""


@pytest.mark.usefixtures("stand_in")
def test_the_short_way_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        assert directly(block, x)(block) is not None
        assert directly(block, x.as_subclass(Tagged))(block) is None
        for where, name, value in ((Tensor, "is_cuda", False), (dispatch, "_direct", {})):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, value)
                assert directly(block, x)(block) is None, name
    model = drawn(lambda: written(residual)(conv(), bn()))
    way = directly(model, x)
    assert way(model) is None  # gradients
    with torch.no_grad():
        assert way(model) is not None
        for odd in (x[:, :5], x[0], x[:0], x.double(), x[:, :, :1]):
            assert directly(model, odd)(model) is None or odd.shape[2] == 1
        for setting in (torch.use_deterministic_algorithms, _set_cudnn_deterministic):
            setting(True)
            assert way(model) is None
            setting(False)
        with torch.enable_grad():
            assert way(model) is None
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert way(model) is None
        handle.remove()
        assert way(model) is not None


@pytest.mark.parametrize("activation", (nn.ReLU, nn.SiLU, nn.Hardswish, nn.Tanh))
@pytest.mark.usefixtures("stand_in")
def test_our_kernel_ends_in_what_a_child_is_now(activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the short way where nobody has changed it."""
    model, x = drawn(lambda: Block(conv(8), nn.BatchNorm2d(8), activation())), torch.randn(2, 6, 9, 8)
    fast = swapped_with(model, "scaled")
    short = direct_way(compiled_of(Block, undecided(model, "scaled").swaps[0].match.attributes)[0])
    assert short is not None
    with torch.no_grad():
        assert short(fast._modules, x) is not None
        torch.testing.assert_close(fast(x), model(x))
        for one in (model, fast):
            one.act = nn.SiLU()
        torch.testing.assert_close(fast(x), model(x))
        assert short(fast._modules, x) is not None
        fast.act.register_forward_hook(lambda *_: None)
        assert short(fast._modules, x) is None
        fast.act = model.act
        monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: x)
        assert short(fast._modules, x) is None


def _set_cudnn_deterministic(to: bool) -> None:
    torch.backends.cudnn.deterministic = to
