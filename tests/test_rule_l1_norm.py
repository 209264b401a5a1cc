"""What the rule about the L1 norm matches, refuses and leaves alone."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import assert_refused, assert_swapped_is_equal, expression
from torch import Tensor, fx, mean

from normswap import rules
from normswap.plans import Match, Reason


def plain(self, x):
    return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


def methods(self, x):
    return x / x.abs().mean(1, keepdim=True)


def positional(self, x):
    return x / x.abs().mean(1, True)


def functions(self, x):
    return torch.div(x, torch.mean(torch.abs(x), 1, True))


def method_of_division(self, x):
    return x.divide(torch.absolute(x).mean((1,), keepdim=True))


def keywords(self, x):
    return torch.true_divide(input=x, other=torch.mean(input=torch.abs(input=x), keepdim=True, dim=[1]))


def locals_and_docstring(self, hidden):
    """Divide by the mean magnitude."""
    size = abs(hidden)
    scale: Tensor = mean(size, dim=1, keepdim=True)
    hidden = hidden / scale
    return hidden


def last_dim(self, x):
    return x / x.abs().mean(dim=-1, keepdim=True)


def third_dim(self, x):
    m = x.abs().mean(dim=2, keepdim=True)
    return x / m


@pytest.mark.parametrize(
    ("forward", "dim"),
    [
        *((plain, 1), (methods, 1), (positional, 1), (functions, 1), (method_of_division, 1), (keywords, 1)),
        *((locals_and_docstring, 1), (last_dim, -1), (third_dim, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_l1_norm_matches_every_spelling(forward: Any, dim: int) -> None:
    module = expression(forward)
    match = rules.find(module)
    assert match == Match("l1_norm", {"dim": dim})
    assert type(match.attributes["dim"]) is int
    assert_swapped_is_equal(module, match, torch.randn(3, 5, 4))


def with_eps(self, x):
    return x / (torch.mean(torch.abs(x), dim=1, keepdim=True) + 1e-5)


def clamped(self, x):
    return x / x.abs().mean(1, keepdim=True).clamp(min=1e-5)


def clamped_positionally(self, x):
    return torch.divide(x, torch.clamp(x.abs().mean(self.dim, keepdim=True), self.least))


def clamped_minimum(self, x):
    return x / x.abs().mean(-1, keepdim=True).clamp_min(self.eps)


def clipped(self, x):
    return x / torch.clip(x.abs().mean(2, keepdim=True), min=0.5)


def eps_first(self, x):
    return x / (self.eps + x.abs().mean(-2, keepdim=True))


def eps_by_function(self, x):
    return x / torch.add(x.abs().mean(0, keepdim=True), 1)


def dim_of_self(self, x):
    return x / x.abs().mean(self.dim, keepdim=True)


VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (with_eps, {"dim": 1, "eps": 1e-5}),
    (clamped, {"dim": 1, "minimum": 1e-5}),
    (clamped_positionally, {"dim": "dim", "minimum": "least"}),
    (clamped_minimum, {"dim": -1, "minimum": "eps"}),
    (clipped, {"dim": 2, "minimum": 0.5}),
    (eps_first, {"dim": -2, "eps": "eps"}),
    (eps_by_function, {"dim": 0, "eps": 1}),
    (dim_of_self, {"dim": "dim"}),
]


@pytest.mark.parametrize(("forward", "attributes"), VARIANTS, ids=lambda v: getattr(v, "__name__", ""))
def test_l1_norm_matches_its_variants_and_reads_numbers_live(forward: Any, attributes: dict[str, Any]) -> None:
    module = expression(forward)
    module.eps, module.least = 0.25, 1
    match = rules.find(module)
    assert match == Match("l1_norm", attributes)
    x = torch.randn(3, 5, 4)
    assert_swapped_is_equal(module, match, x)
    module.eps, module.least, module.dim = -0.125, 0.75, 2
    assert rules.find(module) == match
    assert_swapped_is_equal(module, match, x)
    module.eps = module.least = torch.tensor(0.5)
    assert_swapped_is_equal(module, match, x)


def with_eps_of_config(self, x):
    return x / (x.abs().mean(1, keepdim=True) + self.config.eps)


def clamped_from_above(self, x):
    return x / x.abs().mean(1, keepdim=True).clamp(1e-5, 10.0)


def eps_and_clamp(self, x):
    return x / (x.abs().mean(1, keepdim=True) + 1e-5).clamp(min=1e-5)


def eps_twice(self, x):
    return x / (x.abs().mean(1, keepdim=True) + 1e-5 + 1e-5)


def eps_inside(self, x):
    return x / (x + 1e-5).abs().mean(1, keepdim=True)


def eps_outside(self, x):
    return x / x.abs().mean(1, keepdim=True) + 1e-5


def eps_scaled(self, x):
    return x / torch.add(x.abs().mean(1, keepdim=True), 1e-5, alpha=2)


def dim_read_in_vain(self, x):
    _unused = self.dim
    return x / x.abs().mean(1, keepdim=True)


def tensor_eps(self, x):
    return x / (x.abs().mean(1, keepdim=True) + self.weight)


def normalize(self, x):
    return x / F.normalize(x.abs().mean(1, keepdim=True), p=1)


def two_dims(self, x):
    return x / x.abs().mean((1, 2), keepdim=True)


def dims_dropped(self, x):
    return x / x.abs().mean(1)


def all_dims(self, x):
    return x / x.abs().mean()


def widened(self, x):
    return x / x.abs().mean(1, keepdim=True, dtype=torch.float64)


def twice_abs(self, x):
    m = x.abs()
    return m / m.mean(1, keepdim=True)


def divided_by_itself(self, x):
    m = x.abs().mean(1, keepdim=True)
    return m / m


def weight_divided(self, x):
    return self.weight / x.abs().mean(1, keepdim=True)


def rounded(self, x):
    return torch.div(x, x.abs().mean(1, keepdim=True), rounding_mode="floor")


def in_a_tuple(self, x):
    return (x / x.abs().mean(1, keepdim=True),)


def no_such_dim(self, x):
    return x / x.abs().mean(17, keepdim=True)


def with_linear(self, x):
    return F.linear(x / x.abs().mean(1, keepdim=True), x)


def residual_product(self, x):
    return x * (x / x.abs().mean(1, keepdim=True))


def dim_of_shape(self, x):
    return x / x.abs().mean(x.dim() - 1, keepdim=True)


def dim_of_ndim(self, x):
    return x / x.abs().mean(x.ndim, keepdim=True)


def other_tensor(self, x):
    return x / torch.relu(x).abs().mean(1, keepdim=True)


def mean_called_twice(self, x):
    return x / x.abs().mean(1, keepdim=True) / x.abs().mean(1, keepdim=True)


def without_gradients(self, x):
    with torch.no_grad():
        m = x.abs().mean(1, keepdim=True)
    return x / m


def branching(self, x):
    if self.training:
        return x / x.abs().mean(1, keepdim=True)
    return x


def in_place(self, x):
    x /= x.abs().mean(1, keepdim=True)
    return x


def div_in_place(self, x):
    return x.div_(x.abs().mean(1, keepdim=True))


def querying(self, x):
    return x / x.abs().mean(1, keepdim=torch.is_grad_enabled())


def two_inputs(self, x, y):
    return x / y.abs().mean(1, keepdim=True)


def keyword_only(self, x, *, mask=None):
    return x / x.abs().mean(1, keepdim=True)


def defaulted(self, x=None):
    return x / x.abs().mean(1, keepdim=True)


@torch.no_grad()
def decorated(self, x):
    return x / x.abs().mean(1, keepdim=True)


REFUSED_L1 = [
    *((with_eps_of_config, Reason.UNSUPPORTED, "self.config"), (clamped_from_above, Reason.UNSUPPORTED, "clamp")),
    *((eps_and_clamp, Reason.UNSUPPORTED, "clamp"), (eps_twice, Reason.UNSUPPORTED, "+, +")),
    *((eps_inside, Reason.UNSUPPORTED, "another function"), (eps_scaled, Reason.PART_OF_FORWARD, "add")),
    *((eps_outside, Reason.UNSUPPORTED, "another function"), (dim_read_in_vain, Reason.UNSUPPORTED, "another way")),
    *((tensor_eps, Reason.UNSUPPORTED, "reads self.weight"), (normalize, Reason.PART_OF_FORWARD, "normalize")),
    *((two_dims, Reason.UNSUPPORTED, "(1, 2)"), (dims_dropped, Reason.UNSUPPORTED, "keepdim=False")),
    *((all_dims, Reason.UNSUPPORTED, "dim=None"), (widened, Reason.PART_OF_FORWARD, "mean")),
    (twice_abs, Reason.UNSUPPORTED, ""),
    *(
        (divided_by_itself, Reason.UNSUPPORTED, "another function"),
        (weight_divided, Reason.UNSUPPORTED, "another function"),
    ),
    *((rounded, Reason.PART_OF_FORWARD, "div"), (in_a_tuple, Reason.UNSUPPORTED, "another function")),
    *((no_such_dim, Reason.UNSUPPORTED, "dim=17"), (with_linear, Reason.PART_OF_FORWARD, "linear")),
    *((residual_product, Reason.PART_OF_FORWARD, "*"), (dim_of_shape, Reason.PART_OF_FORWARD, "dim")),
    *((dim_of_ndim, Reason.PART_OF_FORWARD, ".ndim"), (other_tensor, Reason.PART_OF_FORWARD, "relu")),
    *(
        (mean_called_twice, Reason.UNSUPPORTED, "another function"),
        (without_gradients, Reason.NOT_STRAIGHT_LINE, "with"),
    ),
    *((branching, Reason.UNSUPPORTED, "another function"), (in_place, Reason.NOT_STRAIGHT_LINE, "in-place")),
    *((div_in_place, Reason.PART_OF_FORWARD, "div_"), (querying, Reason.PART_OF_FORWARD, "is_grad_enabled")),
    *((two_inputs, Reason.UNSUPPORTED, "y"), (keyword_only, Reason.UNSUPPORTED, "mask")),
    *((defaulted, Reason.UNSUPPORTED, "None"), (decorated, Reason.NOT_STRAIGHT_LINE, "decorator")),
]


@pytest.mark.parametrize(("forward", "reason", "word"), REFUSED_L1, ids=lambda v: getattr(v, "__name__", None))
@pytest.mark.case("other-dim", "other-tensor", "added-eps", "training-branches", "signatures")
@pytest.mark.case("trap-no-grad-block", "trap-grad-query")
def test_l1_norm_refuses_what_holds_it_in_another_form(forward: Any, reason: Reason, word: str) -> None:
    assert_refused(expression(forward), "l1_norm", reason, word)


def no_abs(self, x):
    return x / x.mean(1, keepdim=True)


def sum_not_mean(self, x):
    return x / x.abs().sum(1, keepdim=True)


def times_not_divided(self, x):
    return x * x.abs().mean(1, keepdim=True)


def upside_down(self, x):
    return x.abs().mean(1, keepdim=True) / x


def relative_error(self, x, y):
    return ((x - y).abs() / y).mean()


@pytest.mark.parametrize("forward", [no_abs, sum_not_mean, times_not_divided, upside_down, relative_error])
@pytest.mark.case("l1-without-abs", "sum-not-mean")
def test_l1_norm_is_not_seen_where_it_is_not(forward: Any) -> None:
    assert rules.find(expression(forward)) is None


def test_l1_norm_without_source_is_refused() -> None:
    forward = types.FunctionType(plain.__code__.replace(co_filename="<nowhere>"), globals(), "forward")
    assert_refused(expression(forward), "l1_norm", Reason.SOURCE)


def test_l1_norm_in_a_graph_module_is_refused() -> None:
    assert_refused(fx.symbolic_trace(expression(plain)), "l1_norm", Reason.UNSUPPORTED, "GraphModule")


def test_l1_norm_with_a_forward_on_the_instance_is_refused() -> None:
    module = expression(plain)
    module.forward = types.MethodType(plain, module)
    assert_refused(module, "l1_norm", Reason.INSTANCE_FORWARD)


def test_l1_norm_is_judged_anew_when_the_code_is_another() -> None:
    def forward(self, x):
        return x / x.abs().mean(1, keepdim=True)

    module = expression(forward)
    assert isinstance(rules.find(module), Match)
    forward.__code__ = two_dims.__code__
    assert_refused(module, "l1_norm", Reason.UNSUPPORTED)


def test_an_inherited_forward_matches_and_keeps_its_class() -> None:
    class Child(type(expression(plain))):  # type: ignore[misc]
        """Says nothing of its own."""

    match = rules.find(Child())
    assert match == Match("l1_norm", {"dim": 1})
    assert_swapped_is_equal(Child(), match, torch.randn(4, 7))
