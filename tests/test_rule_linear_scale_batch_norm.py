"""What the rule about Linear -> scale -> BatchNorm matches, refuses and leaves alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import assert_refused, assert_swapped_is_equal, expression, randomise
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normswap import rules
from normswap.plan import Match, Reason

LSB = "linear_scale_batch_norm"
FEATURES, CHANNELS = 6, 5


def block(forward: Callable[..., Any], scale: Any = (CHANNELS,), linear_bias: bool = True, **bn: Any) -> nn.Module:
    module = expression(forward)
    module.gemm = nn.Linear(FEATURES, CHANNELS, bias=linear_bias)
    module.bn = nn.BatchNorm1d(CHANNELS, **bn)
    if isinstance(scale, tuple):
        module.scale = nn.Parameter(torch.empty(scale))
    elif isinstance(scale, Tensor):
        module.register_buffer("scale", scale)
    else:
        module.scale = scale
    return randomise(module)


def one_line(self, x):
    return self.bn(self.gemm(x) * self.scale)


def scale_first(self, x):
    return self.bn(self.scale * self.gemm(x))


def several_lines(self, features):
    """Linear, scale, norm."""
    features = self.gemm(features)
    scaled = torch.mul(features, self.scale)
    out = self.bn(scaled)
    return out


def method_of_product(me, x):
    return me.bn(input=me.gemm(input=x).multiply(me.scale))


SPELLINGS = [one_line, scale_first, several_lines, method_of_product]


@pytest.mark.parametrize("forward", SPELLINGS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.case("scale-forms")
def test_linear_scale_batch_norm_matches_every_spelling(forward: Any, training: bool) -> None:
    module = block(forward).train(training)
    match = rules.find(module)
    assert match == Match(LSB, {"linear": "gemm", "scale": "scale", "batch_norm": "bn"})
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


@pytest.mark.parametrize(
    "options",
    [
        *({"scale": ()}, {"scale": (1,)}, {"scale": (1, CHANNELS)}, {"scale": torch.ones(CHANNELS)}),
        *({"linear_bias": False}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}),
        *({"momentum": 0.0}, {"momentum": 0.3, "eps": 1e-2}),
        {"scale": (), "linear_bias": False, "affine": False, "track_running_stats": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.case("scale-forms", "bn-momentum", "bn-affine-false", "bn-batches-tracked")
def test_linear_scale_batch_norm_matches_every_configuration(options: dict[str, Any], training: bool) -> None:
    module = block(one_line, **options).train(training)
    match = rules.find(module)
    assert isinstance(match, Match), match
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


def test_linear_scale_batch_norm_matches_whatever_modes_its_parts_are_in() -> None:
    module = block(one_line)
    module.bn.eval()
    match = rules.find(module)
    assert isinstance(match, Match)
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))
    module.bn.track_running_stats = False
    assert isinstance(rules.find(module), Match)


def test_linear_scale_batch_norm_matches_in_other_dtypes_and_on_meta() -> None:
    for changed in (block(one_line).half(), block(one_line).double(), block(one_line).to("meta")):
        assert isinstance(rules.find(changed), Match)


@pytest.mark.case("tied-parameters")
def test_linear_scale_batch_norm_matches_tied_tensors() -> None:
    module = block(one_line)
    module.scale = module.bn.weight
    match = rules.find(module)
    assert isinstance(match, Match)
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


def no_scale(self, x):
    return self.bn(self.gemm(x))


def scaled_after(self, x):
    return self.bn(self.gemm(x) * self.scale) * self.scale


def literal_scale(self, x):
    return self.bn(self.gemm(x) * 2.0)


def number_scale(self, x):
    return self.bn(self.gemm(x) * self.factor)


def only_after(self, x):
    return torch.mul(self.bn(self.gemm(x)), self.scale)


def numbers_around(self, x):
    return self.bn(self.factor * self.gemm(x)) * -3


def literal_and_vain(self, x):
    _unused = self.factor
    return self.bn(self.gemm(x) * 2.0)


FACTORS: list[tuple[Any, dict[str, Any]]] = [
    (no_scale, {}),
    (scaled_after, {"scale": "scale", "after": "scale"}),
    (only_after, {"after": "scale"}),
    (literal_scale, {"scale": 2.0}),
    (number_scale, {"scale": "factor"}),
    (numbers_around, {"scale": "factor", "after": -3}),
]


@pytest.mark.parametrize(("forward", "factors"), FACTORS, ids=lambda v: getattr(v, "__name__", None))
@pytest.mark.parametrize("training", [True, False])
def test_linear_scale_batch_norm_matches_every_factor(forward: Any, factors: dict[str, Any], training: bool) -> None:
    module = block(forward).train(training)
    module.factor = -1.5
    match = rules.find(module)
    assert match == Match(LSB, {"linear": "gemm", "batch_norm": "bn", **factors})
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


def test_a_number_that_is_literal_is_not_taken_for_an_attribute_of_the_same_value() -> None:
    module = block(literal_and_vain)
    module.factor = 2.0
    assert_refused(module, LSB, Reason.UNSUPPORTED, "another function")


def plus_one(self, x):
    return self.bn(self.gemm(x) * self.scale + 1)


def activated(self, x):
    return F.relu(self.bn(self.gemm(x) * self.scale))


def linear_twice(self, x):
    return self.bn(self.gemm(x) * self.scale + self.gemm(x))


def output_also_used(self, x):
    y = self.gemm(x)
    return self.bn(y * self.scale) + y


def two_batch_norms(self, x):
    y = self.gemm(x) * self.scale
    return self.bn(y) + self.bn2(y)


def squared(self, x):
    y = self.gemm(x)
    return self.bn(y * y)


def scale_read_in_vain(self, x):
    _unused = self.scale
    y = self.gemm(x)
    return self.bn(y * y)


def factor_of_config(self, x):
    return self.bn(self.gemm(x) * self.config.factor)


def scaled_twice(self, x):
    return self.bn(self.gemm(x) * self.scale * 2)


def scaled_by_its_output(self, x):
    y = self.bn(self.gemm(x))
    return y * y


def flag_read(self, x):
    return self.bn(self.gemm(x) * self.training)


def swapped_arguments(self, x):
    return self.bn(self.gemm(self.scale) * x)


def without_gradients(self, x):
    with torch.no_grad():
        y = self.gemm(x)
    return self.bn(y * self.scale)


def counting(self, x):
    self.calls = self.calls + 1
    return self.bn(self.gemm(x) * self.scale)


def in_place_product(self, x):
    y = self.gemm(x)
    y *= self.scale
    return self.bn(y)


def mul_in_place(self, x):
    return self.bn(self.gemm(x).mul_(self.scale))


def flagged(self, x, flag=True):
    return self.bn(self.gemm(x) * self.scale)


def returned_twice(self, x):
    y = self.bn(self.gemm(x) * self.scale)
    return y, y


def weight_read(self, x):
    return self.bn(self.gemm(x) * self.gemm.weight)


REFUSED_LSB = [
    *((plus_one, Reason.PART_OF_FORWARD, "+"), (activated, Reason.PART_OF_FORWARD, "relu")),
    *((linear_twice, Reason.PART_OF_FORWARD, "self.gemm"), (output_also_used, Reason.PART_OF_FORWARD, "+")),
    (two_batch_norms, Reason.PART_OF_FORWARD, "self.bn2"),
    *((squared, Reason.UNSUPPORTED, "another function"), (swapped_arguments, Reason.UNSUPPORTED, "another function")),
    *(
        (factor_of_config, Reason.UNSUPPORTED, "self.config.factor"),
        (scaled_twice, Reason.UNSUPPORTED, "another function"),
    ),
    *((scaled_by_its_output, Reason.UNSUPPORTED, "another function"), (flag_read, Reason.UNSUPPORTED, "self.training")),
    (scale_read_in_vain, Reason.UNSUPPORTED, "another function"),
    *((without_gradients, Reason.NOT_STRAIGHT_LINE, "with"), (counting, Reason.NOT_STRAIGHT_LINE, "self.calls")),
    *((in_place_product, Reason.NOT_STRAIGHT_LINE, "in-place"), (mul_in_place, Reason.PART_OF_FORWARD, "mul_")),
    *((flagged, Reason.UNSUPPORTED, "flag"), (returned_twice, Reason.UNSUPPORTED, "another function")),
    (weight_read, Reason.UNSUPPORTED, "self.gemm.weight"),
]


@pytest.mark.parametrize(("forward", "reason", "word"), REFUSED_LSB, ids=lambda v: getattr(v, "__name__", None))
@pytest.mark.case("linear-called-twice", "linear-output-used-elsewhere", "one-linear-two-batch-norms")
@pytest.mark.case("side-effects", "signatures", "trap-no-grad-block")
def test_linear_scale_batch_norm_refuses_another_form(forward: Any, reason: Reason, word: str) -> None:
    module = block(forward, scale=(FEATURES,) if forward is swapped_arguments else (CHANNELS,))
    module.bn2, module.factor, module.calls = nn.BatchNorm1d(CHANNELS), 2.0, 0
    if forward is swapped_arguments:
        module.gemm = nn.Linear(CHANNELS, CHANNELS)
        module.scale = nn.Parameter(torch.randn(CHANNELS))
    assert_refused(module, LSB, reason, word)


def linear_after(self, x):
    return self.gemm(self.bn(x) * self.scale)


def linear_after_by_name(self, x):
    x = self.bn(x)
    x = self.gemm(x)
    return x


def apart(self, x):
    return self.gemm(x) * self.scale, self.bn(x)


@pytest.mark.parametrize("forward", [linear_after, linear_after_by_name, apart])
def test_linear_scale_batch_norm_is_not_seen_where_it_is_not(forward: Any) -> None:
    assert rules.find(block(forward)) is None


@pytest.mark.parametrize("scale", [(1, 1, CHANNELS), (3, CHANNELS), (CHANNELS, 1)], ids=str)
@pytest.mark.case("scale-forms")
def test_a_scale_that_is_not_one_value_per_channel_is_refused(scale: Any) -> None:
    assert_refused(block(one_line, scale=scale), LSB, Reason.UNSUPPORTED, "self.scale")


def test_a_scale_that_is_no_parameter_or_buffer_is_refused_even_after_a_match() -> None:
    module = block(one_line)
    assert isinstance(rules.find(module), Match)
    module.__dict__["scale"] = torch.randn(CHANNELS)
    assert_refused(module, LSB, Reason.UNSUPPORTED, "self.scale")
    child = type("Child", (type(module),), {"scale": property(lambda self: torch.ones(CHANNELS))})
    derived = block(one_line)
    derived.__class__ = child
    assert_refused(derived, LSB, Reason.UNSUPPORTED, "self.scale")


def test_a_batch_norm_of_other_width_is_refused() -> None:
    module = block(one_line, scale=())
    module.bn = nn.BatchNorm1d(CHANNELS + 1)
    assert_refused(module, LSB, Reason.UNSUPPORTED, "channels")


def _with_hook(child: nn.Module) -> nn.Module:
    child.register_forward_hook(lambda *_: None)
    return child


def _with_pre_hook(child: nn.Module) -> nn.Module:
    child.register_forward_pre_hook(lambda *_: None)
    return child


def _with_backward_hook(child: nn.Module) -> nn.Module:
    child.register_full_backward_hook(lambda *_: None)
    return child


def _with_backward_pre_hook(child: nn.Module) -> nn.Module:
    child.register_full_backward_pre_hook(lambda *_: None)
    return child


def _with_forward(child: nn.Module) -> nn.Module:
    child.forward = types.MethodType(type(child).forward, child)
    return child


def _parametrized(child: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(child, "weight", nn.Identity())


def _subclassed(child: nn.Module) -> nn.Module:
    child.__class__ = type("Sub", (type(child),), {})
    return child


CHANGES = [
    *(_with_hook, _with_pre_hook, _with_backward_hook, _with_backward_pre_hook),
    *(_with_forward, _parametrized, _subclassed),
]


@pytest.mark.parametrize("name", ["gemm", "bn"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_child_that_is_not_plain_is_refused(name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    module = block(one_line)
    assert isinstance(rules.find(module), Match)
    setattr(module, name, change(getattr(module, name)))
    assert_refused(module, LSB, Reason.CHILD, f"self.{name}")


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


class InTraining(Scale):
    def forward(self, x):
        return x * self.weight if self.training else x


def in_a_row(scale: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CHANNELS), scale, nn.BatchNorm1d(CHANNELS))


def test_a_scale_in_a_sequential_is_a_module_that_multiplies_and_does_nothing_else() -> None:
    match = rules.alone(in_a_row(Scale()))
    assert isinstance(match, Match)
    (run,) = match.attributes["runs"]
    assert (run["linear"], run["scale"], run["attribute"], run["batch_norm"]) == ("0", "1", "weight", "2")
    for other in (ReadsMore, Squares, InTraining):
        assert rules.alone(in_a_row(other())) is None


@pytest.mark.parametrize("change", [*CHANGES[:5]], ids=lambda f: f.__name__)
def test_a_scale_in_a_sequential_that_is_not_plain_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    assert_refused(in_a_row(change(Scale())), LSB, Reason.CHILD, "self.1 carries hooks")


def test_a_child_class_that_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x, raising=False)
    assert_refused(block(one_line), LSB, Reason.CHILD, "self.bn")


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
    assert_refused(module, LSB, Reason.LAZY, "self.gemm")
    module(torch.randn(4, FEATURES))
    assert isinstance(rules.find(module), Match)


def test_a_parametrized_scale_is_refused() -> None:
    module = block(one_line)
    parametrize.register_parametrization(module, "scale", nn.Identity())
    assert_refused(module, LSB, Reason.PARAMETRIZED, "scale")


@pytest.mark.parametrize("name", ["linear", "batch_norm"])
def test_a_function_of_torch_that_was_replaced_is_not_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: replaced(*args, **kwargs) * 2)
    assert_refused(block(one_line), LSB, Reason.UNSUPPORTED, f"{name} was replaced")


def test_a_momentum_of_none_matches_even_when_met_first() -> None:
    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)

    assert isinstance(rules.find(block(forward, momentum=None)), Match)
