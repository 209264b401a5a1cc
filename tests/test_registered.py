"""register_norm: a class declared to be a norm is swapped and proved like any other."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.forwards import norm as forwards_norm
from normswap.forwards.replaced import Replaced, at_once_as
from normswap.plans import READ, Plan
from normswap.rules import registered


class Scaled(nn.Module):
    """An RMSNorm in other words, computed in float32, with a store that keeps it from being recognised."""

    def __init__(self, dim: int, gain: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim)) if gain else None
        self.dim, self.variance_epsilon = dim, 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        self.last = None
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x if self.gamma is None else x * self.gamma).to(hidden.dtype)


class Plain(nn.Module):
    """nn.LayerNorm's attributes, in a class of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps = dim, 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        self.last = None
        return F.layer_norm(x, (self.normalized_shape,), self.weight, self.bias, self.eps)


class Grouped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.last = None
        return F.group_norm(x, 2, self.weight, self.bias, self.eps)


class Doubled(Plain):
    """What it is registered as, it is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "_registered", {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        yield


def register_all() -> None:
    normswap.register_norm("rms_norm", normalized_shape="dim", weight="gamma", eps="variance_epsilon")(Scaled)
    assert normswap.register_norm(nn.LayerNorm)(Plain) is Plain
    normswap.register_norm("group_norm", num_groups=2)(Grouped)
    normswap.register_norm("layer_norm")(Doubled)


def everything() -> nn.Module:
    return randomised(nn.Sequential(Scaled(8), Plain(8), Grouped(8), Scaled(8, gain=False)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("inputs", (True, False))
def test_registered_classes_are_swapped_and_proved(dtype: torch.dtype, inputs: bool) -> None:
    model, x = everything().to(dtype), torch.randn(4, 8).to(dtype)
    # unregistered, no class is a norm; a norm in a forward, called or written out, is a region all the same
    assert {swap.match.kind for swap in normswap.plan(model).swaps} == {"region"}
    register_all()
    swapped = normswap.optimize(model, x if inputs else None)
    report = normswap.report(swapped)
    assert report.swapped == ("0", "1", "2", "3"), str(report)
    assert {row["status"] for row in report.rows} == {"wiring"} and all(row["gradients"] for row in report.rows)
    torch.testing.assert_close(swapped(x), model(x))
    assert [modules.original_class(m) for m in swapped] == [Scaled, Plain, Grouped, Scaled]
    assert isinstance(swapped[0], Scaled) and list(swapped.state_dict()) == list(model.state_dict())


def test_values_are_read_on_every_call() -> None:
    register_all()
    swapped, x = normswap.optimize(nn.Sequential(Scaled(8))), torch.randn(4, 8)
    swapped[0].variance_epsilon = 3.0
    swapped[0].gamma = nn.Parameter(torch.full((8,), 2.0))
    torch.testing.assert_close(swapped(x), 2 * F.rms_norm(x, (8,), eps=3.0))


def test_a_wrong_declaration_is_put_back() -> None:
    register_all()
    model = randomised(nn.Sequential(Doubled(8), Plain(8)))
    with pytest.warns(UserWarning, match=r"put back: 0 \(layer_norm\)"):
        swapped = normswap.optimize(model, torch.randn(4, 8))
    assert type(swapped[0]) is Doubled and normswap.report(swapped).swapped == ("1",)


def test_plans_pickles_and_copies_need_no_registry() -> None:
    register_all()
    model, x = everything(), torch.randn(4, 8)
    swapped = normswap.optimize(model, x)
    text = normswap.report(swapped).plan.to_json()
    registered._registered.clear()
    for twin in (pickle.loads(pickle.dumps(swapped)), copy.deepcopy(swapped)):
        assert torch.equal(twin(x), swapped(x)) and len(normswap.report(twin).swapped) == 4
    again = normswap.apply(model, Plan.from_json(text))
    assert torch.equal(again(x), swapped(x))
    assert [type(m) for m in normswap.revert(again)] == [type(m) for m in model]


def test_what_is_not_as_declared_is_refused_with_the_reason() -> None:
    register_all()
    normswap.register_norm("rms_norm", eps="epsilon", weight="gamma")(Scaled)
    hidden = Plain(8)
    hidden.forward = lambda x: x  # type: ignore[method-assign]
    refused = normswap.plan(nn.Sequential(Scaled(8), hidden)).refused
    assert [r.refusal.reason.name for r in refused] == ["UNSUPPORTED", "INSTANCE_FORWARD"]
    assert "has no eps: give register_norm its eps" in str(refused[0].refusal)

    class Derived(Plain):
        pass

    assert {swap.match.kind for swap in normswap.plan(Derived(8)).swaps} == {"region"}  # F.layer_norm, in a forward


@pytest.mark.parametrize(
    ("arguments", "reads", "error", "text"),
    [
        (
            ("batch_norm",),
            {},
            ValueError,
            "like must be one of 'group_norm', .*, got 'batch_norm'",
        ),
        (("rms_norm",), {"bias": "b"}, ValueError, "a rms_norm reads normalized_shape, weight, eps; got bias"),
        (("rms_norm",), {"eps": None}, TypeError, "eps must be the name of an attribute or a number"),
    ],
)
def test_bad_arguments(arguments: Any, reads: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        normswap.register_norm(*arguments, **reads)
    with pytest.raises(TypeError, match="expected a class of modules"):
        normswap.register_norm("rms_norm")(3)  # type: ignore[type-var]


class Asked(nn.Module):
    def __getattr__(self, name: str) -> Any:
        return None if name == "gain" else super().__getattr__(name)


class HasOne(nn.Module):
    gain = None


@pytest.mark.parametrize(("cls", "gain"), ((Asked, "gain"), (HasOne, "gain"), (nn.Module, (None, "gain"))))
def test_what_may_be_missing_counts_as_none(cls: type[nn.Module], gain: Any) -> None:
    attributes = {f"{READ}normalized_shape": "shape", f"{READ}weight": "gain", f"{READ}eps": 1e-3}
    names = forwards_norm._names("rms_norm", attributes, cls)
    assert names == ["shape" if cls is Asked else (None, "shape"), gain, (None,), (1e-3,)]


class Looks(Plain):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


@pytest.mark.parametrize(("cls", "read"), ((Plain, True), (Looks, False)))
def test_what_looks_up_attributes_itself_is_read_by_python_alone(cls: type[nn.Module], read: bool) -> None:
    assert (at_once_as(Replaced(cls), "layer_norm").norm is not None) == read
