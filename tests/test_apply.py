"""Swapping and putting back: what survives, and that nothing is ever half done."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normswap import finding, modules, swapping
from normswap.plans import Match, NormswapError, Plan, PlanError, Swap


class L1(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gemm = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.bn = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)

    def describe(self) -> str:
        return f"projection to {self.gemm.out_features}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, 6)
        self.layer = nn.LayerNorm(6)
        self.again = self.layer
        self.rms = nn.RMSNorm(6)
        self.l1 = L1()
        self.proj = Projection()
        for name, tensor in self.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in name else torch.randn_like(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return self.rms(self.again(self.proj(self.l1(self.layer(self.group(x))))))


SITES = ["group", "layer", "rms", "l1", "proj"]
"""In training the BatchNorm in proj is one by itself too."""


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def swapped_names(model: nn.Module) -> list[str]:
    named = [name for name, module in model.named_modules() if modules.site_match(module) is not None]
    return [name for name in named if name != "proj.bn"]


def swap(model: nn.Module) -> None:
    swapping.apply(model, finding.plan(model))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.case("train-eval")
def test_a_swapped_model_computes_the_same(model: Model, training: bool) -> None:
    original = copy.deepcopy(model).train(training)
    swap(model.train(training))
    assert swapped_names(model) == SITES
    x = torch.randn(8, 6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = model(ours), original(theirs)
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(got)
    got.backward(cotangent)
    expected.backward(cotangent)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, mine), (_, other) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    for (name, mine), (_, other) in zip(model.named_buffers(), original.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)


@pytest.mark.case("state-dict")
def test_only_the_class_changes(model: Model) -> None:
    before = {name: copy.copy(module.__dict__) for name, module in model.named_modules()}
    ids = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    tensors = {name: (id(t), t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swap(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[key] is before[name][key] for key in before[name])
    assert {name: id(module) for name, module in model.named_modules(remove_duplicate=False)} == ids
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(values)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in after.items()} == tensors
    assert all(torch.equal(tensor, values[name]) for name, tensor in after.items())


def test_what_a_user_sees_of_a_module_stays(model: Model) -> None:
    shown = repr(model)
    swap(model)
    assert repr(model) == shown
    assert isinstance(model.layer, nn.LayerNorm) and isinstance(model.proj, Projection) and isinstance(model.l1, L1)
    assert model.proj.describe() == "projection to 6"
    assert model.again is model.layer


@pytest.mark.case("hooks")
def test_hooks_of_every_kind_are_kept_and_fire(model: Model) -> None:
    fired: list[str] = []
    for name in ("layer", "l1", "proj"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"{name} pre"))
        module.register_forward_hook(lambda *_, name=name: fired.append(f"{name} forward"))
        module.register_full_backward_pre_hook(lambda *_, name=name: fired.append(f"{name} backward pre"))
        module.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} backward"))
    original = copy.deepcopy(model)
    x = torch.randn(8, 6, requires_grad=True)
    original(x).sum().backward()
    expected = list(fired)
    fired.clear()
    swap(model)
    assert fired == []
    model(x).sum().backward()
    assert fired == expected and len(set(fired)) == 12


def test_a_copy_of_a_swapped_model_is_swapped_and_its_own(model: Model) -> None:
    swap(model.eval())
    twin = copy.deepcopy(model)
    assert swapped_names(twin) == SITES
    x = torch.randn(8, 6)
    assert torch.equal(twin(x), model(x))
    assert twin.again is twin.layer is not model.layer
    swapping.revert(twin)
    assert swapped_names(twin) == [] and swapped_names(model) == SITES
    with torch.no_grad():
        twin.proj.scale.zero_()
    assert model.proj.scale.abs().min() > 0


@pytest.mark.case("state-dict")
def test_a_state_dict_goes_both_ways(model: Model) -> None:
    other = Model()
    swap(model)
    other.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(Model().state_dict(), strict=True)
    assert not torch.equal(other.proj.scale, model.proj.scale)


@pytest.mark.case("optimizer-before-swap")
def test_an_optimizer_made_before_goes_on_working(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.proj.scale.detach().clone()
    swap(model)
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.proj.scale, before)


# --- undo and revert --------------------------------------------------------------------------------------------


def test_sites_are_put_back_by_name(model: Model) -> None:
    before = classes(model)
    swap(model)
    swapping.revert(model, {"l1"})
    assert type(model.l1) is L1 and swapped_names(model) == [name for name in SITES if name != "l1"]
    swapping.revert(model, ["layer", "proj"])  # not what is inside it
    assert swapped_names(model) == ["group", "rms"] and modules.site_match(model.proj.bn) is not None
    swapping.revert(model, ())
    assert swapped_names(model) == ["group", "rms"]
    assert classes(swapping.revert(model)) == before


def test_a_subclass_of_ours_is_not_reverted() -> None:
    class Mine(modules.LayerNorm):
        pass

    with pytest.raises(NormswapError, match="0 is now a .*Mine"):
        swapping.revert(nn.Sequential(Mine(6)))


def test_a_site_can_be_swapped_again_after_undo(model: Model) -> None:
    plan = finding.plan(model)
    swapping.apply(model, plan)
    swapping.revert(model)
    swapping.apply(model, plan)
    assert swapped_names(model) == SITES


def test_revert_puts_all_back(model: Model) -> None:
    before = classes(model)
    swap(model)
    model.proj.bn.num_batches_tracked.fill_(7)
    assert swapping.revert(model) is model
    assert classes(model) == before
    assert model.proj.bn.num_batches_tracked == 7
    assert classes(swapping.revert(model)) == before


@pytest.mark.parametrize("root", [nn.LayerNorm(6), L1(), Projection()], ids=lambda m: type(m).__name__)
@pytest.mark.case("root-is-norm")
def test_the_root_can_be_swapped_and_reverted(root: nn.Module) -> None:
    original = type(root)
    swap(root)
    assert modules.original_class(root) is original
    swapping.revert(root, [""])
    assert type(root) is original
    swap(root)
    assert type(swapping.revert(root)) is original


@pytest.mark.parametrize("name", ["layer", "proj"])
@pytest.mark.case("parametrized")
def test_what_was_parametrized_since_is_put_back_under_it(model: Model, name: str) -> None:
    tensor = "scale" if name == "proj" else "weight"
    for names in (None, [name]):
        before = classes(model)
        swap(model)
        parametrize.register_parametrization(model.get_submodule(name), tensor, nn.Identity())
        swapping.revert(model, names)
        assert name not in swapped_names(model) and parametrize.is_parametrized(model.get_submodule(name))
        parametrize.remove_parametrizations(model.get_submodule(name), tensor)
        swapping.revert(model)
        assert classes(model) == before


# --- plans that do not fit --------------------------------------------------------------------------------------


def _altered(plan: Plan, index: int, **site: Any) -> Plan:
    swaps = list(plan.swaps)
    swaps[index] = Swap(dataclasses.replace(swaps[index].site, **site), swaps[index].match)
    return Plan(tuple(swaps))


def _matched(plan: Plan, index: int, match: Match) -> Plan:
    swaps = list(plan.swaps)
    swaps[index] = Swap(swaps[index].site, match)
    return Plan(tuple(swaps))


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda plan: _altered(plan, 4, name="gone"), "no module gone"),
        (lambda plan: _altered(plan, 4, name="proj.gone.bn"), "no module proj.gone.bn"),
        (lambda plan: _altered(plan, 4, name="rms", aliases=()), "rms must be a .*Projection, got .*RMSNorm"),
        (lambda plan: _altered(plan, 4, name="", aliases=()), r"\(root\) must be a .*Projection, got .*Model"),
        (lambda plan: _altered(plan, 1, aliases=("rms",)), "rms and layer must be the same module"),
        (lambda plan: _altered(plan, 1, aliases=("gone",)), "gone and layer must be the same module"),
        (lambda plan: Plan((*plan.swaps, plan.swaps[0])), "two sites are the same module"),
        (lambda plan: _matched(plan, 4, Match("layer_norm")), "layer_norm: no swap of this kind for a Projection"),
        (lambda plan: _matched(plan, 4, Match("no_norm")), "no_norm"),
        (lambda plan: _matched(plan, 3, Match("l1_norm", {})), "l1: attributes {} do not fit l1_norm"),
        (lambda plan: _matched(plan, 3, Match("l1_norm", {"dim": [1]})), "do not fit"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(model: Model, alter: Any, message: str) -> None:
    before = classes(model)
    with pytest.raises(PlanError, match=message):
        swapping.apply(model, alter(finding.plan(model)))
    assert classes(model) == before


def test_a_plan_that_does_not_fit_the_root() -> None:
    with pytest.raises(PlanError, match=r"\(root\): attributes {} do not fit l1_norm"):
        swapping.apply(L1(), _matched(finding.plan(L1()), 0, Match("l1_norm", {})))


def test_a_plan_fits_once(model: Model) -> None:
    plan = finding.plan(model)
    swapping.apply(model, plan)
    now = classes(model)
    with pytest.raises(PlanError, match="group must be a .*GroupNorm, got a swapped"):
        swapping.apply(model, plan)
    assert classes(model) == now


def test_a_plan_read_from_json_fits_a_model_of_the_same_make(model: Model) -> None:
    swapping.apply(model, Plan.from_json(finding.plan(Model()).to_json()))
    assert swapped_names(model) == SITES


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", range(len(SITES)))
def test_an_exception_midway_undoes_everything(
    model: Model, error: BaseException, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan, set_classes = classes(model), finding.plan(model), swapping.set_classes

    def fail_in_time(changes: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
        set_classes(list(changes)[: after + 1])
        assert classes(model) != before
        raise error

    monkeypatch.setattr(swapping, "set_classes", fail_in_time)
    with pytest.raises(type(error)):
        swapping.apply(model, plan)
    assert classes(model) == before


def test_a_class_that_cannot_be_installed_leaves_the_model_as_it_was(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan, swapped_class = classes(model), finding.plan(model), modules.swapped_class

    def wrong_layout(kind: str, original: type[nn.Module], attributes: Any) -> type:
        return dict if kind == "l1_norm" else swapped_class(kind, original, attributes)

    monkeypatch.setattr(modules, "swapped_class", wrong_layout)
    with pytest.raises(TypeError, match="__class__"):
        swapping.apply(model, plan)
    assert classes(model) == before


def test_a_setattr_of_the_models_own_has_no_say() -> None:
    class Frozen(L1):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise AttributeError("frozen")
            super().__setattr__(name, value)

    module = Frozen()
    swap(module)
    assert modules.original_class(module) is Frozen
    swapping.revert(module)
    assert type(module) is Frozen


class Acts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((("name",), None), (("name",), 3), (("type",), []), (("aliases",), [1]), (("attributes",), "region")),
        *((("attributes", "regions", 0, "steps"), []), (("attributes", "regions", 0, "steps", 0, "operand"), 5)),
        *((("attributes", "regions", 0, "shared"), True), (("attributes", "regions", 0, "activation"), [])),
        *((("attributes", "regions", 0, "conditions"), ["x"]), (("attributes", "regions", 0, "beside"), "x")),
        *((("attributes", "regions", 0, "conditions"), [["self.x is", True]]), (("attributes", "regions"), [1])),
        *((("attributes", "regions", 0, "apart"), [1]), (("attributes", "regions", 0, "apart"), {})),
        *((("attributes", "regions", 0, "conditions"), [["self.x", 1]]), (("attributes", "regions"), [])),
    ],
)
def test_a_text_that_was_edited_is_a_plan_error(path: tuple[Any, ...], value: Any) -> None:
    model = Acts()
    data = json.loads(finding.plan(model).to_json())
    place = data["swaps"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError, match="plan|regions"):
        swapping.apply(model, Plan.from_json(json.dumps(data)))
    assert type(model) is Acts


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 5, "gpu": ' + "[" * 100_000])
def test_a_text_that_is_nested_too_deeply_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError, match="plan: not a normswap plan .RecursionError"):
        Plan.from_json(text)
