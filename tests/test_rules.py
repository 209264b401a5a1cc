"""What each rule matches, refuses and leaves alone. A match is run: swapped and original must agree."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, mean, nn
from torch.nn.utils import parametrize

from normswap import modules, rules
from normswap.plan import KINDS, Match, Reason, Refusal
from normswap.rules import linear_scale_batch_norm as lsb
from normswap.rules import source


def randomise(module: nn.Module) -> nn.Module:
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in name else torch.randn_like(tensor))
    return module


def assert_refused(module: nn.Module, kind: str, reason: Reason, word: str = "") -> None:
    answer = rules.find(module)
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == (kind, reason), answer
    assert word in answer.detail


def assert_swapped_is_equal(module: nn.Module, match: Match, x: Tensor) -> None:
    """The class that the match asks for computes what the module did, buffers and gradients included."""
    swapped = copy.deepcopy(module)
    swapped.__class__ = modules.swapped_class(match.kind, type(module), match.attributes)
    for _ in range(2):
        theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, got = module(theirs), swapped(ours)
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(expected)
        expected.backward(weight)
        got.backward(weight)
        torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, mine), original in zip(swapped.state_dict().items(), module.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, original, msg=name)


def test_rules_are_in_the_order_of_kinds() -> None:
    assert tuple(rule.kind for rule in rules.RULES) == KINDS


# --- module sites -----------------------------------------------------------------------------------------------

NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: randomise(nn.LayerNorm(6)),
    "group_norm": lambda: randomise(nn.GroupNorm(2, 6)),
    "rms_norm": lambda: randomise(nn.RMSNorm(6)),
}
by_norm = pytest.mark.parametrize("kind", NORMS)


@by_norm
def test_the_exact_type_matches(kind: str) -> None:
    norm = NORMS[kind]()
    assert rules.find(norm) == Match(kind)
    assert_swapped_is_equal(norm, Match(kind), torch.randn(5, 6))
    assert rules.find(norm.double()) == Match(kind)
    norm.register_forward_hook(lambda *_: None)
    assert rules.find(norm) == Match(kind)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm((3, 4), elementwise_affine=False),
        nn.LayerNorm(4, bias=False),
        nn.GroupNorm(1, 4, affine=False),
        nn.RMSNorm(4, elementwise_affine=False),
        nn.LayerNorm(4, device="meta"),
    ],
    ids=repr,
)
@pytest.mark.case("no-affine")
def test_every_configuration_matches(norm: nn.Module) -> None:
    assert isinstance(rules.find(norm), Match)


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.Dropout(), nn.Module()),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)),
        *(modules.L1Norm(), modules.LinearScaleBatchNorm(3, 4), modules.LayerNorm(4), modules.RMSNorm(4)),
        modules.InstanceNorm2d(4),
    ],
    ids=repr,
)
@pytest.mark.case("sync-batch-norm")
def test_other_modules_and_our_own_are_left_alone(module: nn.Module) -> None:
    assert rules.find(module) is None


@by_norm
def test_a_swapped_module_is_left_alone_parametrized_or_not(kind: str) -> None:
    norm = NORMS[kind]()
    norm.__class__ = modules.swapped_class(kind, type(norm), {})
    assert rules.find(norm) is None
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert rules.find(norm) is None


@by_norm
@pytest.mark.case("subclass-own-forward")
def test_a_subclass_with_a_forward_of_its_own_is_refused_and_one_without_is_not(kind: str) -> None:
    base = type(NORMS[kind]())
    norm = NORMS[kind]()
    norm.__class__ = type("Own", (base,), {"forward": lambda self, x: base.forward(self, x) * 2})
    assert_refused(norm, kind, Reason.SUBCLASS, "Own")
    norm.__class__ = type("Same", (base,), {})
    assert rules.find(norm) == Match(kind)


@by_norm
@pytest.mark.case("instance-forward")
def test_a_forward_on_the_instance_is_refused(kind: str) -> None:
    norm = NORMS[kind]()
    norm.forward = types.MethodType(lambda self, x: x, norm)
    assert_refused(norm, kind, Reason.INSTANCE_FORWARD)


@by_norm
def test_a_forward_patched_on_the_class_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = NORMS[kind]()
    monkeypatch.setattr(type(norm), "forward", lambda self, x: x)
    assert_refused(norm, kind, Reason.UNSUPPORTED, "replaced on the class")


@by_norm
@pytest.mark.case("parametrized")
def test_a_parametrized_norm_is_refused(kind: str) -> None:
    norm = NORMS[kind]()
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert_refused(norm, kind, Reason.PARAMETRIZED, "weight")


@by_norm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.case("script-module")
def test_a_scripted_norm_is_refused(kind: str) -> None:
    assert_refused(torch.jit.script(NORMS[kind]()), kind, Reason.SCRIPTED)


@pytest.mark.case("lazy")
def test_a_lazy_norm_is_refused_until_it_has_shapes() -> None:
    class LazyNorm(nn.modules.lazy.LazyModuleMixin, nn.LayerNorm):  # type: ignore[misc]
        cls_to_become = nn.LayerNorm

        def __init__(self) -> None:
            super().__init__(4)
            self.weight = nn.UninitializedParameter()

    assert_refused(LazyNorm(), "layer_norm", Reason.LAZY)


# --- l1_norm ----------------------------------------------------------------------------------------------------


class Expression(nn.Module):
    """A module of one forward, given as a function."""

    dim = 1


def expression(forward: Callable[..., Any]) -> nn.Module:
    return type("Written", (Expression,), {"forward": forward})()


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
    *((with_eps_of_config, Reason.PART_OF_FORWARD, ".eps"), (clamped_from_above, Reason.UNSUPPORTED, "clamp")),
    *((eps_and_clamp, Reason.UNSUPPORTED, "clamp"), (eps_twice, Reason.PART_OF_FORWARD, "+")),
    *((eps_inside, Reason.UNSUPPORTED, "another function"), (eps_scaled, Reason.UNSUPPORTED, "add")),
    *((eps_outside, Reason.UNSUPPORTED, "add"), (dim_read_in_vain, Reason.UNSUPPORTED, "another way")),
    *((tensor_eps, Reason.UNSUPPORTED, "reads self.weight"), (normalize, Reason.PART_OF_FORWARD, "normalize")),
    *((two_dims, Reason.UNSUPPORTED, "[1, 2]"), (dims_dropped, Reason.UNSUPPORTED, "keepdim=False")),
    *((all_dims, Reason.UNSUPPORTED, "mean.default"), (widened, Reason.UNSUPPORTED, "dtype")),
    (twice_abs, Reason.UNSUPPORTED, ""),
    *((divided_by_itself, Reason.UNSUPPORTED, "div"), (weight_divided, Reason.UNSUPPORTED, "reads self.weight")),
    *((rounded, Reason.UNSUPPORTED, "div.Tensor_mode"), (in_a_tuple, Reason.UNSUPPORTED, "tuple")),
    *((no_such_dim, Reason.TRACE, "IndexError"), (with_linear, Reason.PART_OF_FORWARD, "linear")),
    *((residual_product, Reason.PART_OF_FORWARD, "*"), (dim_of_shape, Reason.PART_OF_FORWARD, "dim")),
    *((dim_of_ndim, Reason.PART_OF_FORWARD, ".ndim"), (other_tensor, Reason.PART_OF_FORWARD, "relu")),
    *((mean_called_twice, Reason.PART_OF_FORWARD, "abs"), (without_gradients, Reason.NOT_STRAIGHT_LINE, "with")),
    *((branching, Reason.NOT_STRAIGHT_LINE, "if"), (in_place, Reason.NOT_STRAIGHT_LINE, "in-place")),
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


# --- linear_scale_batch_norm ------------------------------------------------------------------------------------

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
    *((squared, Reason.UNSUPPORTED, "another function"), (swapped_arguments, Reason.UNSUPPORTED, "train")),
    *((factor_of_config, Reason.PART_OF_FORWARD, ".factor"), (scaled_twice, Reason.UNSUPPORTED, "another function")),
    *((scaled_by_its_output, Reason.UNSUPPORTED, "another function"), (flag_read, Reason.UNSUPPORTED, "self.training")),
    (scale_read_in_vain, Reason.UNSUPPORTED, "another function"),
    *((without_gradients, Reason.NOT_STRAIGHT_LINE, "with"), (counting, Reason.NOT_STRAIGHT_LINE, "self.calls")),
    *((in_place_product, Reason.NOT_STRAIGHT_LINE, "in-place"), (mul_in_place, Reason.PART_OF_FORWARD, "mul_")),
    *((flagged, Reason.UNSUPPORTED, "flag"), (returned_twice, Reason.UNSUPPORTED, "tuple")),
    (weight_read, Reason.PART_OF_FORWARD, ".weight"),
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


@pytest.mark.parametrize(
    ("linear", "word"),
    [
        (lambda x, w, b: torch.addmm(b, x, w.t()), "addmm"),
        (lambda x, w, b: torch.ops.aten.linear(x, w), "another function"),
        (lambda x, w, b: torch.ops.aten.linear(x, w, b) * 1, "aten.mul.Tensor, aten.mul.Tensor"),
    ],
    ids=["other_op", "bias_forgotten", "one_op_more"],
)
def test_a_match_needs_the_trace_and_not_only_the_scan(linear: Any, word: str, monkeypatch: Any) -> None:
    """A source that says bn(gemm(x) * scale) is not believed where torch computes something else."""

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)

    monkeypatch.setattr(nn.functional, "linear", linear)
    assert isinstance(source.scan(forward), source.Scan)
    assert_refused(block(forward), LSB, Reason.UNSUPPORTED, word)


def test_a_momentum_of_none_matches_even_when_met_first() -> None:
    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)

    assert isinstance(rules.find(block(forward, momentum=None)), Match)


def test_a_verdict_is_kept_for_modules_of_one_make(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rules.find(block(one_line)), Match)
    monkeypatch.setattr(lsb.tracing, "trace", lambda *_, **__: pytest.fail("traced again"))
    assert isinstance(rules.find(block(one_line)), Match)
