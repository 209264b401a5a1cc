"""Regions with convolutions in a row, computed by one native op: as if there were a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from convolution_models import Block, bn, conv, drawn, regions_in, swapped_with, undecided, written
from convolution_stand_in import several_by_pytorch, stand_in  # noqa: F401
from norm_act_models import NormAct
from resnet import Bottleneck
from torch import Tensor, nn

import normswap
from normswap.ops import dispatch
from normswap.plans import Match, Plan, Swap
from normswap.regions import chain, install
from normswap.regions.foldings import without_convolution
from normswap.regions.helper import make_helper

IMAGE = (2, 6, 9, 8)


class Rows(Block):
    """Three convolutions in a row and a residual."""

    def __init__(self) -> None:
        super().__init__(conv(), bn())
        self.conv2, self.conv3, self.bn3 = conv(), conv(), bn()

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn(self.conv(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.shortcut is not None:
            x = self.shortcut(x)
        out += x
        return self.act(out)


class Passed(Rows):
    """With children between the convolutions that hand on what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.aa, self.drop = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.aa(self.act(self.bn(self.conv(x))))
        out = self.act(self.bn2(self.conv2(out)))
        out = self.drop(self.aa(out))
        return self.act(self.bn3(self.conv3(out)) + x)


def seen_between(self: Any, x: Tensor) -> Tensor:
    out = F.relu(self.bn(self.conv(x)))
    print(out.shape, end="")
    return F.relu(self.bn2(self.conv(out)))


def written_between(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    out = F.relu(self.bn(self.conv(x)))
    x += 1
    return F.relu(self.bn2(self.conv(out))) + x


def used_again(self: Any, x: Tensor) -> Tensor:
    out = F.relu(self.bn(self.conv(x)))
    return F.relu(self.bn2(self.conv(out)) + out)


def six(self: Any, x: Tensor) -> Tensor:
    x = self.act(self.bn(self.conv(x)))
    x = self.act(self.bn(self.conv(x)))
    x = self.act(self.bn(self.conv(x)))
    x = self.act(self.bn(self.conv(x)))
    x = self.act(self.bn(self.conv(x)))
    x = self.act(self.bn(self.conv(x)))
    return x.sum(dim=1)


@pytest.fixture
def rows(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:  # noqa: F811
    """How many regions each call of the op was of."""
    found: list[int] = []

    def counted(x: Any, tensors: Any, numbers: Any, floats: Any, added: Any) -> Any:
        out = several_by_pytorch(x, tensors, numbers, floats, added)
        found.extend([] if out is None else [len(floats) // 3])
        return out

    monkeypatch.setitem(dispatch._direct, "convolutions_batch_norm_eval", counted)
    return found


def assert_alike(fast: Any, model: Any, x: Tensor) -> None:
    with torch.no_grad():
        ours = fast(x)
        assert type(ours) is Tensor
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-4)


def with_shortcut() -> Any:
    model = Rows()
    model.shortcut = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))
    return model


MADE = (Rows, Passed, with_shortcut, lambda: Bottleneck(6, 4, 2), lambda: Bottleneck(16, 4, 1))


@pytest.mark.parametrize("make", MADE)
def test_a_row_is_one_op(make: Callable[[], Any], rows: list[int]) -> None:
    model = drawn(make)
    fast = swapped_with(model, "fused")
    x = torch.randn(2, next(model.children()).in_channels, 9, 8)
    assert_alike(fast, model, x)
    assert rows == [3]
    assert_alike(copy.deepcopy(fast), model, x)
    again = normswap.apply(model, Plan.from_json(undecided(model, "fused").to_json()))
    assert_alike(again, model, x)
    assert rows == [3, 3, 3]


def test_more_than_the_op_takes_are_several(rows: list[int]) -> None:
    model = drawn(lambda: written(six)(conv(), bn()))
    fast = swapped_with(model, "fused")
    assert_alike(fast, model, torch.randn(IMAGE))
    assert rows == [4, 2]


@pytest.mark.parametrize("forward", (seen_between, written_between, used_again))
def test_what_is_seen_between_is_there(forward: Callable[..., Any], rows: list[int]) -> None:
    model = drawn(lambda: written(forward)(conv(), bn()))
    assert [region.then for region in regions_in(undecided(model))] == [None, None]
    assert_alike(swapped_with(model, "fused"), model, torch.randn(IMAGE))
    assert rows == []


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.conv2.register_forward_hook(lambda *args: args[2] * 2),
    "hook on the first": lambda m: m.bn.register_forward_hook(lambda *args: args[2] * 2),
    "hook on the last": lambda m: m.bn3.register_forward_pre_hook(lambda *args: (args[1][0] + 1,)),
    "another norm": lambda m: setattr(m, "bn2", nn.GroupNorm(2, 6)),
    "another activation": lambda m: setattr(m, "act", nn.SiLU()),
    "hidden": lambda m: m.__dict__.__setitem__("bn2", nn.Identity()),
    "training": lambda m: m.bn3.train(),
    "no statistics": lambda m: (setattr(m.bn2, "running_mean", None), setattr(m.bn2, "running_var", None)),
    "float64": lambda m: m.double(),
    "padding": lambda m: setattr(m.conv2, "padding", (2, 2)),
    "padding mode": lambda m: m.conv3.__setstate__({**m.conv3.__dict__, "padding_mode": "reflect"}),
    "data": lambda m: m.conv3.weight.data.mul_(-2.0),
    "statistics": lambda m: m.bn2.running_mean.add_(1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_is_seen(name: str, rows: list[int]) -> None:
    model = drawn(Rows)
    fast = swapped_with(model, "fused")
    for one in (model, fast):
        CHANGES[name](one)
    x = torch.randn(IMAGE).to(model.conv.weight.dtype)
    if name == "padding":
        x_of = lambda m: outcome(m, x)  # noqa: E731
        assert x_of(fast) == x_of(model)
        return
    assert_alike(fast, model, x)
    assert (rows == [3]) == (name in ("data", "statistics"))


@pytest.mark.parametrize("passing", (nn.Dropout2d(0.5).train(), nn.ReLU(), nn.AvgPool2d(3, 1, 1)))
def test_a_child_that_no_longer_hands_on_is_called(passing: nn.Module, rows: list[int]) -> None:
    model = drawn(Passed)
    fast = swapped_with(model, "fused")
    found = []
    for one in (model, fast):
        one.drop = passing
        with torch.no_grad(), torch.random.fork_rng():
            found.append(one(torch.ones(IMAGE)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert rows == []  # the second leads to what it was found to lead to, or is by itself


class Ending(Passed):
    """Its norms end in an activation themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.bn2 = NormAct(), NormAct()

    def forward(self, x: Tensor) -> Tensor:
        out = self.aa(self.bn(self.conv(x)))
        return self.act(self.bn3(self.conv3(self.aa(self.bn2(self.conv2(out))))) + x)


@pytest.mark.parametrize("make", (Passed, Ending))
def test_without_the_convolution_nothing_is_handed_on(make: Callable[[], Any]) -> None:
    model = drawn(make)
    regions = regions_in(undecided(model))
    assert [region.then is not None for region in regions] == [True, True, False]
    left = [without_convolution(region) for region in regions]
    steps = [one and [step.does for step in one.steps] for one in left]
    ending = [None, None] if make is Ending else [["norm", "activation"]] * 2
    assert steps == [*ending, ["norm", "residual", "activation"]]
    assert [one.passes for one in left if one] == [()] * len([one for one in left if one])
    x = torch.randn(IMAGE)
    fast = normswap.optimize(model, x)  # no fold here
    torch.testing.assert_close(fast(x), model(x))
    assert {row["status"] for row in normswap.report(fast).rows} <= {"proved", "wiring"}


def outcome(model: Any, x: Tensor) -> Any:
    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        model(x)
    return str(raised.value)


def test_gradients_and_other_inputs(rows: list[int]) -> None:
    model = drawn(Rows)
    fast = swapped_with(model, "fused")
    for one in (model, fast):
        one.requires_grad_()
        one(torch.ones(IMAGE)).sum().backward()
    assert torch.equal(fast.conv.weight.grad, model.conv.weight.grad) and rows == []
    for shape in ((2, 5, 9, 8), (2, 6, 9)):
        assert outcome(fast, torch.randn(shape)) == outcome(model, torch.randn(shape))


def test_a_region_that_is_put_back_leaves_the_others(rows: list[int]) -> None:
    model = drawn(Rows)
    (swap,) = undecided(model, "fused").swaps
    for left in ((0, 1), (0, 2), (1, 2), (1,)):
        regions = [swap.match.attributes["regions"][index] for index in left]
        plan = Plan((Swap(swap.site, Match("region", {**swap.match.attributes, "regions": regions})),))
        rows.clear()
        assert_alike(normswap.apply(model, plan), model, torch.randn(IMAGE))
        assert rows == ([2] if left in ((0, 1), (1, 2)) else [])


def test_nothing_is_kept_of_a_call_that_raises(rows: list[int]) -> None:
    model = drawn(with_shortcut)
    model.shortcut.append(nn.Conv2d(5, 5, 1))
    fast = swapped_with(model, "fused")
    assert outcome(fast, torch.randn(IMAGE)) == outcome(model, torch.randn(IMAGE)) and rows == []


def test_compiled_it_is_its_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_may_wait", lambda x: True)
    model = drawn(Rows)
    fast = torch.compile(swapped_with(model, "fused"), backend="eager", fullgraph=True)
    assert_alike(fast, model, torch.randn(IMAGE))


def test_what_waits_is_computed_where_the_rest_is_compiled(stand_in: None) -> None:  # noqa: F811
    """A compiler that gives up in the middle of a forward compiles what is left of it."""
    model, x = drawn(Rows), torch.randn(IMAGE)
    (swap,) = undecided(model, "fused").swaps
    compiled = install.compiled_of(Rows, swap.match.attributes)
    helpers = chain.in_rows(compiled, [make_helper(one) for one in compiled])
    with torch.no_grad():
        waiting = helpers[1](model, helpers[0](model, x))
        assert type(waiting) is chain.Pending
        with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
            out = helpers[2](model, (waiting, x.clone()))
        torch.testing.assert_close(out, model(x))


class First(Rows):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn(self.conv(x))))))
        return F.relu(x + self.bn3(self.conv3(x)))


def test_a_sum_is_laid_out_after_its_first_operand(rows: list[int]) -> None:
    model = drawn(First).to(memory_format=torch.channels_last)
    fast = swapped_with(model, "fused")
    x = torch.randn(IMAGE)
    assert_alike(fast, model, x)
    with torch.no_grad():
        assert fast(x).stride() == model(x).stride() == x.stride()
    assert rows == [2, 2]
