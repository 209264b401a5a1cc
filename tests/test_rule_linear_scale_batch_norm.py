"""Which forms of Linear -> scale -> BatchNorm its rule matches, refuses and leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_scale_models import CHANNELS, FEATURES, LSB, block, one_line
from rule_checks import assert_refused, assert_swapped_is_equal
from torch import nn

from normswap import rules
from normswap.plan import Match, Reason


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


def test_a_momentum_of_none_matches_even_when_met_first() -> None:
    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)

    assert isinstance(rules.find(block(forward, momentum=None)), Match)
