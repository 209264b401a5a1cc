"""Convolution -> BatchNorm -> residual -> activation in eval, on a CPU: found, and folded on every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convolution_cases import CASES, Case
from convolution_checks import TOLERANCE, outcome
from convolution_models import (
    Block,
    bn,
    conv,
    drawn,
    regions_in,
    residual,
    swapped_with,
    undecided,
    written,
)
from torch import nn

import normswap
from normswap import ops, reference
from normswap.activation import Activation
from normswap.plans import Plan
from normswap.proof.product_bounds import times_pytorchs


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


def first_of_a_sum(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.bn(self.conv(x))


def residual_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + self.bn(self.conv(x))
    return x.view(len(x), -1)  # which other strides do not allow


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "permuted": lambda x: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
    "a part": lambda x: torch.cat([x, x], 3)[..., :8],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum_is_laid_out_after_its_first_operand(layout: str) -> None:
    """As of a model in channels_last that is given a contiguous image."""
    model = drawn(lambda: written(residual_first)(conv(), bn())).to(memory_format=torch.channels_last)
    x = LAYOUTS[layout](torch.randn(2, 6, 9, 8))
    ours, theirs = outcome(swapped_with(model), x), outcome(model, x)
    assert ours == theirs if isinstance(theirs, str) else torch.allclose(ours[0], theirs[0], atol=1e-5)
    with torch.no_grad():
        model, fast = (drawn(lambda: written(first_of_a_sum)(conv(), bn())) for _ in range(2))
        assert swapped_with(fast)(x).stride() == model(x).stride()
