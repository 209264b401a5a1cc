"""From a model to a plan: each module object once, filters, and nothing of the model touched."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from processor_time import takes_less
from torch import Tensor, nn

import normswap
from normswap import finding
from normswap.plans import Plan, Reason, Refusal, Site
from normswap.swapping import apply


class L1(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class WithEps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean((1, 2), keepdim=True) + 1e-6)


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(2, 4, 1), nn.GroupNorm(2, 4))
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": Projection()}) for _ in range(2))
        self.l1 = L1()
        self.eps = WithEps()
        self.head = nn.RMSNorm(4)
        self.eval()  # in training a BatchNorm is a site too


def names(plan: Plan) -> dict[str, str]:
    return {swap.site.name: swap.match.kind for swap in plan.swaps}


def excluded(plan: Plan) -> list[str]:
    return [refused.site.name for refused in plan.refused if refused.refusal.reason is Reason.EXCLUDED]


ALL = {
    "stem.1": "group_norm",
    "blocks.0.norm": "layer_norm",
    "blocks.0.proj": "region",
    "blocks.1.norm": "layer_norm",
    "blocks.1.proj": "region",
    "l1": "l1_norm",
    "head": "rms_norm",
}


@pytest.mark.case("containers")
def test_every_kind_is_found_in_module_order() -> None:
    plan = finding.plan(Model())
    assert names(plan) == ALL and list(names(plan)) == list(ALL)
    (refused,) = plan.refused
    assert refused.site.name == "eps" and refused.refusal.reason is Reason.UNSUPPORTED
    assert Plan.from_json(plan.to_json()) == plan


def test_a_site_has_its_type_by_its_importable_name() -> None:
    plan = finding.plan(nn.ModuleList([nn.LayerNorm(4), L1()]))
    assert plan.swaps[0].site == Site("0", "torch.nn.modules.normalization.LayerNorm")
    assert plan.swaps[1].site == Site("1", f"{__name__}.L1")


@pytest.mark.parametrize("model", [nn.LayerNorm(4), L1(), Projection()], ids=lambda m: type(m).__name__)
def test_the_root_can_be_a_site(model: nn.Module) -> None:
    swap, *_ = finding.plan(model).swaps
    assert swap.site.name == ""


@pytest.mark.case("shared-module")
def test_a_shared_module_is_one_site_with_aliases() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.LayerNorm(4)]), "b": nn.ModuleList([nn.RMSNorm(4)])})
    model["b"].append(model["a"][0])
    model["c"] = model["a"]
    plan = finding.plan(model)
    assert [swap.site.name for swap in plan.swaps] == ["a.0", "b.0"]
    assert plan.swaps[0].site.aliases == ("b.1", "c.0")


def test_equal_modules_are_not_the_same() -> None:
    class AllEqual(nn.LayerNorm):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = nn.Module.__hash__

    assert len(finding.plan(nn.Sequential(AllEqual(4), AllEqual(4))).swaps) == 2


@pytest.mark.filterwarnings("error")
def test_a_filter_is_asked_about_modules_only() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    model.register_module("none", None)
    asked: list[Any] = []
    finding.plan(model, include=lambda module, name: asked.append((type(module), name)))
    assert asked == [(nn.LayerNorm, "0")]


def test_a_module_that_holds_its_ancestor_ends() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    model[0].parent = model
    (swap,) = finding.plan(model).swaps
    assert swap.site == Site("0", "torch.nn.modules.normalization.LayerNorm")


def test_the_model_is_not_changed() -> None:
    model = Model()
    classes = [type(module) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    finding.plan(model)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_a_swapped_model_has_nothing_left_to_swap() -> None:
    model = Model()
    apply(model, finding.plan(model))
    assert finding.plan(model).swaps == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.case("script-module")
def test_every_norm_in_a_script_module_is_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(4), torch.jit.script(nn.Sequential(nn.LayerNorm(4), nn.ReLU())))
    plan = finding.plan(model)
    assert names(plan) == {"0": "layer_norm"}
    assert [(r.site.name, r.refusal) for r in plan.refused] == [("1.0", Refusal("layer_norm", Reason.SCRIPTED))]


# --- filters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, list(ALL)),
        ("*", list(ALL)),
        ("blocks.*", [name for name in ALL if name.startswith("blocks")]),
        ("blocks.?.norm", ["blocks.0.norm", "blocks.1.norm"]),
        ("head", ["head"]),
        ([], []),
        (["head", "l1"], ["l1", "head"]),
        (("head", lambda module, name: isinstance(module, nn.GroupNorm)), ["stem.1", "head"]),
        ("re:blocks\\.[1-9]\\..*", ["blocks.1.norm", "blocks.1.proj"]),
        (lambda module, name: name.endswith("0.norm"), ["blocks.0.norm"]),
        ({"l1"}, ["l1"]),
    ],
)
def test_include_and_exclude_are_complements(include: Any, expected: list[str]) -> None:
    model = Model().eval()  # in training a BatchNorm is a site where what calls it is none
    plan = finding.plan(model, include=include)
    assert list(names(plan)) == expected
    everything = [*ALL, "eps"]
    left_out = excluded(plan)
    assert set(left_out).isdisjoint(expected) and set(left_out) | set(expected) | {"eps"} == set(everything)
    if include is not None:
        assert list(names(finding.plan(model, exclude=include))) == [name for name in ALL if name not in expected]


def test_exclude_wins_over_include() -> None:
    plan = finding.plan(Model(), include="blocks.*", exclude="*.norm")
    assert list(names(plan)) == ["blocks.0.proj", "blocks.1.proj"]


@pytest.mark.parametrize("pattern", ["re:block", "re:.*nor", "re:ead", "Head", "lock"])
def test_patterns_match_whole_names_in_their_own_case(pattern: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"include: the pattern {pattern!r} matches no module")) as caught:
        plan = finding.plan(Model(), include=pattern)
    assert names(plan) == {}
    assert caught[0].filename == __file__


def test_a_pattern_that_matches_a_module_but_no_site_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(finding.plan(Model(), exclude=["stem", "re:blocks"])) == ALL


def test_any_of_the_names_counts() -> None:
    model = nn.ModuleDict({"a": nn.LayerNorm(4)})
    model["b"] = model["a"]
    assert excluded(finding.plan(model, exclude="b")) == ["a"]
    assert names(finding.plan(model, include="b")) == {"a": "layer_norm"}
    assert excluded(finding.plan(model, exclude=lambda module, name: name == "b")) == ["a"]


def test_the_root_matches_an_empty_pattern_and_a_star() -> None:
    assert excluded(finding.plan(nn.LayerNorm(4), exclude="")) == [""]
    assert excluded(finding.plan(nn.LayerNorm(4), exclude="*")) == [""]


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    ("given", "shown"), [(3, "int"), (nn.LayerNorm, "LayerNorm"), ([b"head"], "bytes"), (nn.ReLU(), "ReLU")]
)
def test_a_filter_of_another_type_is_a_type_error(argument: str, given: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}: .*got {shown}"):
        finding.plan(Model(), **{argument: given})


def test_a_broken_regular_expression_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=re.escape("exclude: 're:(' is not a regular expression")):
        finding.plan(Model(), exclude="re:(")


def test_what_is_no_module_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=re.escape("got dict; load_state_dict it into a model first")):
        normswap.plan({"a": 1})  # type: ignore[arg-type]


def test_a_large_model_is_walked_fast() -> None:
    finding.plan(Model())  # PyTorch loads its tracing machinery once
    model = nn.ModuleList(Model() for _ in range(100))
    assert takes_less(10, lambda: finding.plan(model))  # 0.2 s of a core that nobody else uses
    assert len(finding.plan(model).swaps) == 100 * len(ALL)
