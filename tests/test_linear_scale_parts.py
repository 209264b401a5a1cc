"""What the parts of Linear -> scale -> BatchNorm, its modules and the scale, must be for the rule."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_scale_models import CHANNELS, FEATURES, assert_left, block, found_in, one_line
from rule_checks import assert_swapped_is_equal
from torch import nn
from torch.nn.utils import parametrize

from normswap import rules
from normswap.plans import Match, Reason, Refusal
from normswap.regions.spec import Region


@pytest.mark.parametrize("scale", [(1, 1, CHANNELS), (3, CHANNELS), (CHANNELS, 1)], ids=str)
@pytest.mark.case("scale-forms")
def test_a_scale_that_is_not_one_value_per_channel_is_refused(scale: Any) -> None:
    assert_left(block(one_line, scale=scale), Reason.UNSUPPORTED, "self.scale")


def test_a_scale_that_is_no_parameter_or_buffer_is_read_as_the_forward_reads_it() -> None:
    module = block(one_line)
    module.__dict__["scale"] = torch.randn(CHANNELS)
    child = type("Child", (type(module),), {"scale": property(lambda self: self.bn.weight + 1)})
    derived = block(one_line)
    derived.__class__ = child
    for one in (module, derived):
        match, _ = found_in(one)
        assert_swapped_is_equal(one, match, torch.randn(8, FEATURES))


def test_a_batch_norm_of_other_width_is_refused() -> None:
    module = block(one_line, scale=())
    module.bn = nn.BatchNorm1d(CHANNELS + 1)
    assert_left(module, Reason.UNSUPPORTED, "channels")


def _with(register: str) -> Callable[[nn.Module], nn.Module]:
    def hooked(child: nn.Module) -> nn.Module:
        getattr(child, register)(lambda *_: None)
        return child

    hooked.__name__ = register
    return hooked


HOOKS = [f"register_{which}_hook" for which in ("forward", "forward_pre", "full_backward", "full_backward_pre")]


def _with_forward(child: nn.Module) -> nn.Module:
    child.forward = types.MethodType(type(child).forward, child)
    return child


def _parametrized(child: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(child, "weight", nn.Identity())


def _subclassed(child: nn.Module) -> nn.Module:
    child.__class__ = type("Sub", (type(child),), {})
    return child


CHANGES = [
    *map(_with, HOOKS),
    *(_with_forward, _parametrized, _subclassed),
]


@pytest.mark.parametrize("name", ["gemm", "bn"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_child_that_is_not_plain_is_refused(name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    module = block(one_line)
    assert isinstance(rules.find(module), Match)
    setattr(module, name, change(getattr(module, name)))
    assert_left(module, Reason.CHILD, f"self.{name}")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x):
        return x * self.weight


class ReadsMore(Scale):
    factor = 2.0

    def forward(self, x):
        _unused = self.factor
        return x * self.weight


class Squares(Scale):
    def forward(self, x):
        return x * x


class Ignores(Scale):
    def forward(self, x):
        return 2.0 * self.weight


class InTraining(Scale):
    def forward(self, x):
        return x * self.weight if self.training else x


def in_a_row(scale: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CHANNELS), scale, nn.BatchNorm1d(CHANNELS))


def test_a_scale_in_a_sequential_is_a_module_that_multiplies_and_does_nothing_else() -> None:
    match = rules.find(in_a_row(Scale()))
    assert isinstance(match, Match)
    (data,) = match.attributes["regions"]
    region = Region.from_json(data)
    assert (region.linear, *region.factor[:2], region.norm) == ("0", "1", "weight", "2")
    for other in (ReadsMore, Squares, Ignores, InTraining):
        assert rules.find(in_a_row(other())) is None


@pytest.mark.parametrize("change", [*CHANGES[:5]], ids=lambda f: f.__name__)
def test_a_scale_in_a_sequential_that_is_not_plain_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    assert_left(in_a_row(change(Scale())), Reason.CHILD, "self.1 carries hooks")


def test_a_child_class_that_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x, raising=False)
    assert_left(block(one_line), Reason.CHILD, "self.bn")


@pytest.mark.case("sync-batch-norm")
def test_other_norms_in_the_place_of_the_batch_norm_are_left_alone() -> None:
    for other in (nn.SyncBatchNorm(CHANNELS), nn.LayerNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)):
        module = block(one_line)
        module.bn = other
        assert rules.find(module) is None


@pytest.mark.case("lazy")
def test_lazy_children_are_refused_until_they_have_shapes() -> None:
    module = block(one_line)
    module.gemm, module.bn = nn.LazyLinear(CHANNELS), nn.LazyBatchNorm1d()
    assert_left(module, Reason.LAZY, "self.gemm")
    module(torch.randn(4, FEATURES))
    assert isinstance(rules.find(module), Match)


def test_a_parametrized_scale_is_refused() -> None:
    module = block(one_line)
    parametrize.register_parametrization(module, "scale", nn.Identity())
    answer = rules.find(module)
    assert isinstance(answer, Refusal) and (answer.reason, answer.detail) == (Reason.PARAMETRIZED, "scale")


@pytest.mark.parametrize("name", ["linear", "batch_norm"])
def test_a_function_of_torch_that_was_replaced_is_not_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: replaced(*args, **kwargs) * 2)
    assert_left(block(one_line), Reason.UNSUPPORTED, f"{name} was replaced")
