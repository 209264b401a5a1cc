"""Which forms of a whole forward Linear -> scale -> BatchNorm are found, refused and left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_scale_models import CHANNELS, FEATURES, assert_left, block, found_in, one_line
from rule_checks import assert_swapped_is_equal
from torch import nn

from normswap import rules
from normswap.plans import Match, Reason


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
    match, name = found_in(module)
    assert name == "gemm + scale + bn"
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
    match, _ = found_in(module)
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


def test_linear_scale_batch_norm_matches_whatever_modes_its_parts_are_in() -> None:
    module = block(one_line)
    module.bn.eval()
    match, _ = found_in(module)
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
    match, _ = found_in(module)
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


FACTORS = {
    no_scale: "gemm + bn",
    scaled_after: "gemm + scale + bn + scale",
    only_after: "gemm + bn + scale",
    literal_scale: "gemm + scale + bn",
    number_scale: "gemm + scale + bn",
    numbers_around: "gemm + scale + bn + scale",
    literal_and_vain: "gemm + scale + bn",
}


@pytest.mark.parametrize("forward", FACTORS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_linear_scale_batch_norm_matches_every_factor(forward: Any, training: bool) -> None:
    module = block(forward).train(training)
    module.factor = -1.5
    match, name = found_in(module)
    assert name == FACTORS[forward]
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))
    module.factor = 0.5
    assert_swapped_is_equal(module, match, torch.randn(8, FEATURES))


def plus_one(self, x):
    return self.bn(self.gemm(x) * self.scale + 1)


def linear_twice(self, x):
    return self.bn(self.gemm(x) * self.scale + self.gemm(x))


def squared(self, x):
    y = self.gemm(x)
    return self.bn(y * y)


def scale_read_in_vain(self, x):
    _unused = self.scale
    y = self.gemm(x)
    return self.bn(y * y)


def scaled_twice(self, x):
    return self.bn(self.gemm(x) * self.scale * 2)


def swapped_arguments(self, x):
    return self.bn(self.gemm(self.scale) * x)


def without_gradients(self, x):
    with torch.no_grad():
        y = self.gemm(x)
    return self.bn(y * self.scale)


def in_place_product(self, x):
    y = self.gemm(x)
    y *= self.scale
    return self.bn(y)


def by_its_mode(self, x):
    return self.bn(self.gemm(x) * (self.scale if self.training else 1.0))


def mul_in_place(self, x):
    return self.bn(self.gemm(x).mul_(self.scale))


REFUSED = {
    plus_one: "self.gemm(x) * self.scale + 1",
    linear_twice: "+ self.gemm(x)",
    squared: "y * y",
    scale_read_in_vain: "y * y",
    swapped_arguments: "self.gemm(self.scale) * x",
    scaled_twice: "* 2",
    in_place_product: "y *= self.scale",
    mul_in_place: "mul_",
    by_its_mode: "if self.training",
    without_gradients: "in one stretch",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.case("linear-called-twice", "linear-output-used-elsewhere", "one-linear-two-batch-norms")
@pytest.mark.case("side-effects", "signatures", "trap-no-grad-block")
def test_linear_scale_batch_norm_refuses_another_form(forward: Any) -> None:
    module = block(forward, scale=(FEATURES,) if forward is swapped_arguments else (CHANNELS,)).eval()
    if forward is swapped_arguments:
        module.gemm = nn.Linear(CHANNELS, CHANNELS)
        module.scale = nn.Parameter(torch.randn(CHANNELS))
    reason = Reason.NOT_STRAIGHT_LINE if forward is without_gradients else Reason.UNSUPPORTED
    assert_left(module, reason, REFUSED[forward])


def test_what_has_no_source_is_refused_for_that() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.bn(self.gemm(x) * self.scale)", scope)
    assert_left(block(scope["forward"]), Reason.SOURCE)


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
