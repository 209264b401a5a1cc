"""What the rules about modules match, refuse and leave alone."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from rule_checks import assert_refused, assert_swapped_is_equal, randomise
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normswap import modules, rules
from normswap.plans import Match, Reason, Refusal

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
        *(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.SyncBatchNorm(4), nn.Dropout(), nn.Module()),
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


def by_hand(self: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_subclass_that_writes_its_norm_out_is_matched_as_written() -> None:
    assert isinstance(rules.alone(type("Own", (nn.RMSNorm,), {"forward": by_hand})(6)), Match)


class PartOfMore(nn.Module):
    """An RMSNorm by hand that is refused, and a LayerNorm with a sum before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6)
        return self.norm(x + y)


def test_a_norm_within_does_not_hide_what_an_expression_is_refused_for() -> None:
    module = PartOfMore()
    assert isinstance(rules.region.match(module, rules.alone), Match)
    assert rules.find(module) == rules.alone(module) and isinstance(rules.find(module), Refusal)


def test_what_is_refused_and_sharded_is_refused_for_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "is_sharded", lambda module: True)
    norm = nn.LayerNorm(6)
    assert rules.find(norm) == Refusal("layer_norm", Reason.SHARDED)
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    answer = rules.find(norm)
    assert isinstance(answer, Refusal) and answer.reason is Reason.PARAMETRIZED


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
