"""Regions whose convolution cuDNN computes with its ReLU, by the code in Python that serves where C++ does not: as
PyTorch, also where cuDNN's own op asks less."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import Block, bn, conv, drawn, swapped_with, undecided, written
from cudnn_stand_in import CALLED, by_python, cudnn
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import normswap
from normswap.plans import Plan

__all__ = ["by_python", "cudnn"]
pytestmark = pytest.mark.usefixtures("by_python")
X = torch.randn(2, 6, 9, 8).bfloat16()
LIMITS: Any = {"rtol": 0.05, "atol": 0.1}


def added_behind(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(x)) + y)


def added_to(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y + self.bn(self.conv(x)))


def plain() -> Any:
    return drawn(lambda: Block(conv(), bn())).bfloat16().requires_grad_(False)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        return type(error), str(error).partition("\n")[0]


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, tuple) and isinstance(theirs[0], type):
        assert ours == theirs
        return
    torch.testing.assert_close(ours, theirs, **LIMITS)
    assert isinstance(theirs, tuple) or ours.stride() == theirs.stride()


def test_cudnn_is_called() -> None:
    model, fast = plain(), swapped_with(plain(), "fused")
    for x in (X, X.contiguous(memory_format=torch.channels_last)):
        assert_same(fast(x), model(x))
    assert CALLED == ["convolution"] * 2


@pytest.mark.parametrize("forward", (added_behind, added_to))
def test_with_a_residual_of_either_layout(forward: Any) -> None:
    model = drawn(lambda: written(forward)(conv(), bn())).bfloat16().requires_grad_(False)
    fast = swapped_with(model, "fused")
    for layout in (torch.contiguous_format, torch.channels_last):
        for of_added in (torch.contiguous_format, torch.channels_last):
            x, added = X.contiguous(memory_format=layout), torch.randn_like(X).contiguous(memory_format=of_added)
            assert_same(fast(x, added), model(x, added))
    assert CALLED == ["convolution"] * 4


NOT_ASKED: dict[str, tuple[Callable[[Any], object], Callable[[Tensor], Tensor]]] = {
    "no room for the kernel": (lambda m: setattr(m.conv, "padding", (0, 0)), lambda x: x[..., :2]),
    "no room, in steps": (
        lambda m: (setattr(m.conv, "padding", (0, 0)), setattr(m.conv, "stride", (2, 2))),
        lambda x: x[..., :2],
    ),
    "negative padding": (lambda m: setattr(m.conv, "padding", (-1, 0)), lambda x: x),
    "no dilation": (lambda m: setattr(m.conv, "dilation", (0, 1)), lambda x: x),
    "no steps": (lambda m: setattr(m.conv, "stride", (1, 0)), lambda x: x),
    "no groups": (lambda m: setattr(m.conv, "groups", 0), lambda x: x),
    "groups of others": (lambda m: setattr(m.conv, "groups", 2), lambda x: x),
    "a number for both dims": (lambda m: setattr(m.conv, "padding", (1,)), lambda x: x),
    "nothing": (lambda m: None, lambda x: x[:0]),
    "one image": (lambda m: None, lambda x: x[0]),
}


@pytest.mark.parametrize("what", NOT_ASKED)
def test_what_pytorch_refuses_cudnn_is_not_asked(what: str) -> None:
    model, fast = plain(), swapped_with(plain(), "fused")
    change, given = NOT_ASKED[what]
    for one in (model, fast):
        change(one)
    assert_same(outcome(lambda: fast(given(X))), outcome(lambda: model(given(X))))
    assert CALLED == []


def dual(model: Any) -> Any:
    with forward_ad.dual_level():
        return (*forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))),)


def of_weights(model: Any) -> Any:
    weight = model.conv.weight.detach()
    return jvp(lambda w: functional_call(model, {"conv.weight": w}, X), (weight,), (torch.ones_like(weight),))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),)),
    "forward mode": dual,
    "forward mode of weights": of_weights,
    "vmap": lambda model: vmap(model)(X[None]),
    "a gradient of vmap": lambda model: grad(lambda x: vmap(model)(x).sum())(X[None]),
}


@pytest.mark.parametrize("what", TRANSFORMS)
@pytest.mark.parametrize("learns", (False, True))
def test_transforms_go_the_way_they_went(what: str, learns: bool) -> None:
    model, fast = plain(), swapped_with(plain(), "fused")
    with torch.set_grad_enabled(learns):
        assert_same(TRANSFORMS[what](fast), TRANSFORMS[what](model))
    assert CALLED == []


@pytest.mark.parametrize("name", ("enabled", "deterministic"))
def test_cudnn_may_be_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = plain(), swapped_with(plain(), "fused")
    monkeypatch.setattr(torch.backends.cudnn, name, name == "deterministic")
    assert_same(fast(X), model(X))
    assert CALLED == []


@pytest.mark.parametrize("more", ({}, {"then": [1, 0, 1, 9]}))
def test_a_plan_of_an_earlier_version_names_what_there_is_no_more(more: dict[str, Any]) -> None:
    """A way to compute a convolution, or that a region led into the next one: it is computed apart."""
    model = plain()
    data = json.loads(undecided(model, "matmul").to_json())
    for swap in data["swaps"]:
        for region in swap["attributes"]["regions"]:
            region.update(more)
    fast = normswap.apply(model, Plan.from_json(json.dumps(data)))
    assert type(fast) is not type(model)
    assert_same(fast(X), model(X))
    assert CALLED == []
