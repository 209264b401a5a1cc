"""BatchNorms that end in an activation, by themselves: what is read of their forwards, and the short way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import norm_act_models as models
import pytest
import torch
import torch.nn.functional as F
from convolution_models import drawn
from norm_act_models import LOOK_ALIKES, Alone, NormAct, Short
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import normswap
from normswap import native
from normswap.activation import FUNCTIONS, Activation
from normswap.ops import dispatch
from normswap.regions.ending import behind_of, children_behind

IMAGE = (2, 6, 5, 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were a GPU: the activations of the native op's calls."""
    found: list[str] = []

    def op(x: Any, mean: Any, var: Any, weight: Any, bias: Any, eps: Any, residual: Any, *end: Any) -> Tensor | None:
        if x.shape[1] != mean.numel():
            return None
        code, low, high = end
        found.append([*FUNCTIONS][code])
        return Activation(found[-1], low, high)(F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps))

    native.load()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {"batch_norm_eval": op})
    return found


@pytest.mark.parametrize(
    ("cls", "behind"), [(NormAct, ("drop", "act")), (Short, ("drop", "act")), (Alone, ()), (nn.BatchNorm2d, None)]
)
def test_what_a_class_calls_behind_its_norm(cls: Any, behind: tuple[str, ...] | None) -> None:
    assert behind_of(cls) == behind
    if behind is not None:
        assert children_behind(cls()) == behind


@pytest.mark.parametrize("cls", LOOK_ALIKES)
def test_what_only_looks_like_one(cls: type[NormAct]) -> None:
    assert children_behind(cls()) is None


def _without(name: str) -> NormAct:
    norm = NormAct()
    norm._modules[name] = None
    return norm


def _with(name: str, value: Any) -> NormAct:
    norm = NormAct()
    norm.__dict__[name] = value
    return norm


def _calling() -> NormAct:
    class Calling(NormAct):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args) * 2

    return Calling()


@pytest.mark.parametrize(
    "make", (lambda: _without("act"), lambda: _with("act", F.relu), lambda: _with("forward", F.relu), _calling)
)
def test_instances_that_are_no_such_ones(make: Callable[[], NormAct]) -> None:
    assert children_behind(make()) is None


@pytest.mark.parametrize(
    "act", (nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.Identity(), nn.LeakyReLU(0.2))
)
@pytest.mark.parametrize("cls", (NormAct, Short, Alone))
def test_the_short_way_is_the_same_function(cls: Any, act: nn.Module, calls: list[str]) -> None:
    model = drawn(lambda: nn.Sequential(cls(copy.deepcopy(act), nn.Dropout(0.3))))
    fast, x = normswap.apply(model, normswap.plan(model)), torch.randn(IMAGE)
    if cls is Alone or type(act) is nn.Identity:
        assert not normswap.plan(model).swaps  # a norm alone, by PyTorch's own op
        return
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(calls) == 1


def _hooked(child: Any) -> None:
    child.register_forward_hook(lambda module, args, out: out * 3)


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "another activation": (lambda n: setattr(n, "act", nn.SiLU()), 1),
    "an eps": (lambda n: setattr(n, "eps", 0.5), 1),
    "a mean": (lambda n: n.running_mean.data.fill_(3.0), 1),
    "an activation that is not known": (lambda n: setattr(n, "act", nn.Softplus()), 0),
    "a hooked activation": (lambda n: _hooked(n.act), 0),
    "a hooked dropout": (lambda n: _hooked(n.drop), 0),
    "a dropout": (lambda n: setattr(n, "drop", nn.Dropout(1.0).train()), 0),
    "an activation of its own": (lambda n: n.__dict__.update(act=torch.neg), 0),
    "a dropout of its own": (lambda n: n.__dict__.update(drop=torch.neg), 0),
    "training": (lambda n: n.train(), 0),
    "no statistics": (lambda n: n._buffers.update(running_mean=None, running_var=None), 0),
    "a weight that is computed": (lambda n: parametrize.register_parametrization(n, "weight", nn.Softplus()), 1),
    "a weight that is pruned": (lambda n: prune.l1_unstructured(n, "weight", 3), 1),
    "a weight that is no parameter": (lambda n: n.__dict__.update(weight=n._parameters.pop("weight").detach() * 3), 1),
    "a mean before the registered one": (lambda n: n.__dict__.update(running_mean=torch.ones(6)), 1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_later_is_seen(what: str, calls: list[str]) -> None:
    change, count = CHANGES[what]
    model, x = drawn(lambda: nn.Sequential(NormAct())), torch.randn(IMAGE)
    fast = normswap.apply(model, normswap.plan(model))
    for one in (model, fast):
        change(one[0])
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(calls) == count


def test_what_the_short_way_leaves_to_the_statements(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = drawn(lambda: nn.Sequential(NormAct())), torch.randn(IMAGE)
    fast = normswap.apply(model, normswap.plan(model))
    assert torch.equal(fast(x), model(x)) and not calls  # a gradient is recorded
    with torch.no_grad():
        for wrong in (x[0], x[:, :5]):
            with pytest.raises((AssertionError, RuntimeError)) as ours:
                fast(wrong)
            with pytest.raises((AssertionError, RuntimeError)) as theirs:
                model(wrong)
            assert str(ours.value) == str(theirs.value)
        with normswap.disabled(fast):
            fast(x)
        assert not calls
        torch.testing.assert_close(fast[0](x=x), model[0](x=x))
        for one in (model, fast):
            with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
                one[0](x, more=1)
        calls.clear()
        monkeypatch.setattr(F, "batch_norm", lambda x, *rest: x * 0.5)
        torch.testing.assert_close(fast(x), model(x))
        assert not calls


def test_a_class_that_was_written_anew(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = drawn(lambda: nn.Sequential(NormAct())), torch.randn(IMAGE)
    fast = normswap.apply(model, normswap.plan(model))
    monkeypatch.setattr(NormAct, "forward", models.Doubled.forward)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x)) and not calls


@pytest.mark.parametrize("planned", (False, True))
def test_another_batch_norm_that_was_there_when_it_was_swapped(
    planned: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = drawn(lambda: nn.Sequential(NormAct())), torch.randn(IMAGE)
    plan = normswap.plan(model)
    monkeypatch.setattr(F, "batch_norm", lambda x, *rest: x * 0.5)
    fast = normswap.apply(model, plan if planned else normswap.plan(model))
    with torch.no_grad():
        assert torch.equal(fast(x), model(x)) and not calls
