"""What may happen to a swapped RMSNorm written by hand afterwards, and the modes it is run in."""

from __future__ import annotations

from typing import Any

import pytest
import rms_models
import torch
from models import randomised
from rms_models import (
    Calls,
    Flags,
    Functions,
    Helpers,
    OfChannelsWeighted,
    Optional_,
    Power,
    Times,
    TrainingIsRead,
    assert_same,
    made,
    shape_for,
)
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import normswap
from normswap import modules, rules
from normswap.plans import Match, Reason, Refusal
from normswap.rules import whole_forward

KINDS = (Times, Power, OfChannelsWeighted)
"""The weight after a cast, an offset before it, along another dim than the last."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def pair(cls: type[nn.Module]) -> tuple[Any, Any, Tensor]:
    """(the original, a swapped copy of it, an input)."""
    module = made(cls)
    return module, normswap.optimize(module, validate="off"), torch.randn(shape_for(cls))


def assert_equal(ours: Any, theirs: Any, x: Tensor, calls: Calls, served: bool) -> None:
    before = calls.count
    assert_same(ours(x), theirs(x), x.dtype)
    assert (calls.count > before) == served


# --- what is changed later ----------------------------------------------------------------------------------------


def test_what_hides_the_weight_is_the_weight(calls: Calls) -> None:
    module, swapped, x = pair(Times)
    for one in (module, swapped):
        one.__dict__["weight"] = torch.full_like(one.weight, 3.0)
    assert_equal(swapped, module, x, calls, True)


@pytest.mark.case("attributes-changed-later")
def test_eps_and_weight_are_read_on_every_call(calls: Calls) -> None:
    module, swapped, x = pair(Times)
    with torch.no_grad():
        for norm in (module, swapped):
            norm.weight.data[2] = 7.0
            norm.eps = 0.5
    assert_equal(swapped, module, x, calls, served=True)
    weight = nn.Parameter(torch.randn(6))
    module.weight = swapped.weight = weight
    module.eps = swapped.eps = 2  # an int
    assert_equal(swapped, module, x, calls, served=True)
    module.eps = swapped.eps = torch.tensor(0.3)
    assert_equal(swapped, module, x, calls, served=False)
    module.eps = swapped.eps = 1e-6
    module.weight = swapped.weight = nn.Parameter(torch.randn(5, 6))  # broadcasts, and is no weight of a norm
    assert_equal(swapped, module, x, calls, served=False)
    module.weight = swapped.weight = nn.Parameter(torch.randn(6).double())
    assert_equal(swapped, module, x, calls, served=False)
    del module.weight, swapped.weight
    for norm in (module, swapped):
        with pytest.raises(AttributeError, match="weight"):
            norm(x)


@pytest.mark.case("attributes-changed-later", "training-branches")
def test_a_flag_that_changes_brings_the_original_back(calls: Calls) -> None:
    module, swapped, x = pair(Flags)
    assert_equal(swapped, module, x, calls, served=True)
    for name, value in (("force", False), ("dim", 1), ("with_scale", True)):
        before = getattr(module, name)
        for norm in (module, swapped):
            setattr(norm, name, value)
            norm.scale = torch.tensor(3.0)
        assert_equal(swapped, module, x, calls, served=False)
        for norm in (module, swapped):
            setattr(norm, name, before)
    assert_equal(swapped, module, x, calls, served=True)
    module, swapped, x = pair(TrainingIsRead)
    assert_equal(swapped.train(), module.train(), x, calls, served=True)


@pytest.mark.case("attributes-changed-later")
def test_code_that_changes_brings_the_original_back(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    module, swapped, x = pair(Helpers)
    swapped._square = module._square = lambda x: x.abs()
    assert_equal(swapped, module, x, calls, served=False)
    del swapped._square, module._square
    assert_equal(swapped, module, x, calls, served=True)
    with monkeypatch.context() as patched:
        patched.setattr(Helpers, "_square", lambda self, x: x.abs())
        assert_equal(swapped, module, x, calls, served=False)
    module, swapped, x = pair(Functions)
    assert_equal(swapped, module, x, calls, served=True)
    with monkeypatch.context() as patched:
        patched.setattr(rms_models, "rstd_of", lambda x, eps: 3.0)
        assert_equal(swapped, module, x, calls, served=False)
    module, swapped, x = pair(Helpers)
    with monkeypatch.context() as patched:
        patched.setattr(Helpers, "forward", lambda self, x: x + 1)
        assert torch.equal(swapped(x), x + 1)
    assert_equal(swapped, module, x, calls, served=True)


def test_a_module_alike_is_not_read_again_until_code_that_it_calls_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, read = whole_forward.read_whole, list[str]()
    monkeypatch.setattr(whole_forward, "read_whole", lambda *given: read.append("") or whole(*given))  # type: ignore[func-returns-value]

    def other(self: Any, x: Tensor) -> Tensor:
        return x.abs()

    for cls, owner, name in ((Helpers, Helpers, "_square"), (Functions, rms_models, "rstd_of")):
        modules, count = (made(cls), made(cls)), len(read)
        assert all(isinstance(rules.alone(module), Match) for module in modules) and len(read) <= count + 1
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, other)
            assert not isinstance(rules.alone(modules[0]), Match)
        with monkeypatch.context() as patched:
            patched.setattr(getattr(owner, name), "__code__", other.__code__)
            assert not isinstance(rules.alone(modules[0]), Match)
        assert isinstance(rules.alone(modules[0]), Match)


@pytest.mark.case("later-hooks", "hooks")
def test_hooks_attached_later_fire(calls: Calls) -> None:
    _, swapped, x = pair(Power)
    seen: list[str] = []
    swapped.register_forward_pre_hook(lambda *_: seen.append("before"))
    swapped.register_forward_hook(lambda *_: seen.append("after"))
    swapped.register_full_backward_hook(lambda *_: seen.append("backward"))
    swapped(x.requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"] and calls.count == 1


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.case("later-weight-norm", "parametrized")
@pytest.mark.parametrize("cls", KINDS)
def test_a_parametrization_registered_later_counts(cls: type[nn.Module], calls: Calls) -> None:
    module, swapped, x = pair(cls)
    for norm in (module, swapped):
        parametrize.register_parametrization(norm, "weight", Twice())
    assert_equal(swapped, module, x, calls, served=True)
    answer = rules.find(module)
    assert isinstance(answer, Refusal) and answer.reason is Reason.PARAMETRIZED


class Adapted(nn.Module):
    """What an adapter library puts in a module's place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.delta = base, nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x * self.delta


@pytest.mark.case("later-lora", "later-add-module")
def test_adapters_and_children_added_later(calls: Calls) -> None:
    model = nn.Sequential(nn.Linear(6, 6), made(Times), nn.Linear(6, 6))
    swapped, x = normswap.optimize(model.eval(), validate="off"), torch.randn(3, 6)
    torch.manual_seed(1)
    model[1] = Adapted(model[1])
    torch.manual_seed(1)
    swapped[1] = Adapted(swapped[1])
    for sequence in (model, swapped):
        sequence[1].base.add_module("more", nn.Identity())
    assert_equal(swapped, model, x, calls, served=True)
    normswap.revert(swapped)
    assert_equal(swapped, model, x, calls, served=False)


# --- how it is run ------------------------------------------------------------------------------------------------


@pytest.mark.case("autocast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", [*KINDS, Optional_])
def test_autocast_is_the_originals(cls: type[nn.Module], dtype: torch.dtype) -> None:
    module, swapped, x = pair(cls)
    with torch.autocast("cpu", dtype=dtype):
        for given in (x, x.to(dtype)):
            assert_same(swapped(given), module(given), torch.float32)


@pytest.mark.case("functorch", "double-backward", "forward-mode-ad")
@pytest.mark.parametrize("cls", KINDS)
def test_transforms_are_the_originals(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    direction, weights = torch.randn_like(x), {"weight": torch.randn(2, 6)}

    def results(norm: nn.Module) -> list[Tensor]:
        many = torch.vmap(lambda w: torch.func.functional_call(norm, w, (x,)))(weights)
        value, tangent = torch.func.jvp(norm, (x,), (direction,))
        rows = torch.vmap(norm, in_dims=0)(x[None].expand(2, *x.shape))
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(norm(leaf).sin().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * direction).sum(), leaf)
        return [many, value, tangent, rows, torch.func.grad(lambda x: norm(x).sin().sum())(x), first, second]

    for ours, theirs in zip(results(swapped), results(module), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.case("no-grad-inference", "activation-checkpointing", "requires-grad-each", "frozen-parameters")
@pytest.mark.parametrize("cls", KINDS)
def test_gradient_modes(cls: type[nn.Module], calls: Calls) -> None:
    module, swapped, x = pair(cls)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_equal(swapped, module, x, calls, served=True)
            assert not swapped(x).requires_grad
    for frozen in (False, True):
        for norm in (module, swapped):
            norm.requires_grad_(not frozen)
        ours, theirs = x.clone().requires_grad_(frozen), x.clone().requires_grad_(frozen)
        checkpoint(swapped, ours, use_reentrant=False).sin().sum().backward()
        module(theirs).sin().sum().backward()
        got, expected = (ours.grad, theirs.grad) if frozen else (swapped.weight.grad, module.weight.grad)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert (ours.grad is None) == (not frozen)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cls", [*KINDS, Helpers, Functions, Optional_])
def test_compile_and_export_without_graph_breaks(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    torch._dynamo.reset()
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True, dynamic=True)
    for given in (x, torch.cat([x, x])):
        assert_same(compiled(given), module(given), torch.float32)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(ours).sin().sum().backward()
    module(theirs).sin().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(swapped, (x,)).module()
    assert_same(exported(x), module(x), torch.float32)


@pytest.mark.parametrize("cls", KINDS)
def test_symbolic_trace_still_works(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    assert_same(fx.symbolic_trace(swapped)(x), module(x), torch.float32)


@pytest.mark.case("signatures")
def test_calls_in_every_form(calls: Calls) -> None:
    module, swapped, x = pair(Optional_)
    assert_same(swapped(hidden_states=x), module(x), torch.float32)
    assert calls.count == 1
    for wrong in ({}, {"x": x}, {"hidden_states": x, "more": 1}):
        with pytest.raises(TypeError) as expected:
            module(**wrong)
        with pytest.raises(TypeError) as got:
            swapped(**wrong)
        assert str(got.value) == str(expected.value)


class Marked(Tensor):
    """A tensor subclass: what is done to it may mean something else."""


def test_tensor_subclasses_go_to_the_original(calls: Calls) -> None:
    module, swapped, x = pair(Times)
    given = x.as_subclass(Marked)
    assert torch.equal(swapped(given), module(given)) and type(swapped(given)) is Marked and calls.count == 0


# --- subclasses ---------------------------------------------------------------------------------------------------


class Inherits(Times):
    """No forward of its own."""


class CallsSuper(Times):
    def forward(self, x):
        return super().forward(x) + 1


class OtherHelper(Helpers):
    def _square(self, x):
        return x.abs().pow(3)


class SameHelper(Helpers):
    def _square(self, x):
        return torch.mul(x, x)


@pytest.mark.case("subclass-own-forward", "instance-forward")
def test_subclasses_are_judged_by_what_they_compute(calls: Calls) -> None:
    for cls in (Inherits, SameHelper):
        assert isinstance(rules.find(randomised(cls())), Match)
        assert_equal(normswap.optimize(cls().eval(), validate="off"), cls(), torch.zeros(2, 6), calls, served=True)
    for cls in (CallsSuper, OtherHelper):
        assert not isinstance(rules.find(cls()), Match)
    module: Any = Times()
    module.forward = lambda x: x
    answer = rules.find(module)
    assert isinstance(answer, Refusal) and answer.reason is Reason.INSTANCE_FORWARD


@pytest.mark.case("shared-module", "tied-parameters", "root-is-norm")
def test_shared_modules_and_tied_weights_stay_so() -> None:
    norm, other = made(Times), made(Times)
    other.weight = norm.weight
    model = nn.ModuleDict({"a": norm, "b": norm, "c": other})
    swapped = normswap.optimize(model, inplace=True, validate="off")
    assert swapped["a"] is swapped["b"] and swapped["c"].weight is swapped["a"].weight
    assert all(modules.site_match(m) is not None for m in swapped.values())
    assert type(normswap.revert(swapped)["a"]) is Times


@pytest.mark.case("meta-device")
def test_a_module_on_meta_is_swapped_and_run_where_it_goes() -> None:
    with torch.device("meta"):
        module = Times()
    swapped = normswap.optimize(module, validate="off").to_empty(device="cpu")
    plain = made(Times)
    swapped.load_state_dict(plain.state_dict())
    x = torch.randn(3, 6)
    assert_same(swapped(x), plain(x), torch.float32)
    assert swapped.to("meta")(x.to("meta")).device.type == "meta"
