"""The short way through C++ of a region that is a GroupNorm, over a stand-in for the native op on the CPU: what it
computes, and all that makes it leave the region to the long way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import calls, compiled, needs_compiler, registered, short_way
from models import randomised
from torch import Tensor, nn

import normswap

__all__ = ["calls", "compiled", "registered", "short_way"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("short_way")]

CHANNELS = 8
Calls = list[tuple[Any, ...]]


class Children(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.GroupNorm(2, CHANNELS), nn.ReLU(), nn.Dropout(0.5)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(x)))


class Residual(Children):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.act(self.norm(x) + r)


class Literal(Children):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class Called(Children):
    """As timm's GroupNormAct."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        x = F.group_norm(x, self.norm.num_groups, self.norm.weight, self.norm.bias, self.norm.eps)
        return self.act(self.drop(x))


FORMS: tuple[type[Children], ...] = (Children, Residual, Literal, Called)


def drawn() -> Tensor:
    return torch.randn(2, CHANNELS, 3, 5)


def short(form: type[Children], calls: Calls) -> tuple[Any, Callable[[], Any]]:
    """The model, swapped, and its short way on what it was called with."""
    model = randomised(form()).eval()
    ours = normswap.apply(model, normswap.plan(model, include=""))
    x, r = drawn(), drawn()
    torch.testing.assert_close(ours(x, r), model(x, r))
    ((one, owner, packed),) = calls
    return ours, lambda: one(owner, packed)


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("form", FORMS)
def test_one_op_computes_it(form: type[Children], gradients: bool, calls: Calls) -> None:
    with torch.set_grad_enabled(gradients):
        _, again = short(form, calls)
        assert again() is not None


def _hooked(name: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda *given: None)


def _own_forward(model: Any) -> None:
    model.norm.forward = lambda x: x * 2


class _Subclass(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def _subclass(model: Any) -> None:
    model.norm.__class__ = _Subclass


def _another_activation(model: Any) -> None:
    model.act = nn.Softplus()


def _on(model: Any) -> None:
    model.drop.train()


CHANGES: dict[str, tuple[type[Children], Callable[[Any], None]]] = {
    "a hook": (Children, _hooked("norm")),
    "a hook on the activation": (Residual, _hooked("act")),
    "a hook on the dropout": (Called, _hooked("drop")),
    "a forward of its own": (Literal, _own_forward),
    "a subclass": (Residual, _subclass),
    "another activation": (Called, _another_activation),
    "a dropout that is on": (Children, _on),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_left_to_the_long_way(name: str, calls: Calls) -> None:
    form, change = CHANGES[name]
    model, again = short(form, calls)
    assert again() is not None
    change(model)
    assert again() is None


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("dtypes", itertools.product((torch.float32, torch.bfloat16), repeat=2), ids=str)
def test_a_residual_of_float32_is_added_under_autocast(
    dtypes: tuple[torch.dtype, torch.dtype], gradients: bool, calls: Calls
) -> None:
    model = randomised(Residual()).eval()
    ours: Any = normswap.apply(model, normswap.plan(model, include=""))
    x, r = (drawn().to(dtype) for dtype in dtypes)
    ours(x.float(), r.float())
    ((one, *_),) = calls
    torch.set_autocast_enabled("cuda", True)
    with torch.set_grad_enabled(gradients):
        out = one(ours, (x, r))
    if dtypes[1] is torch.bfloat16:
        assert out is None
    else:
        torch.testing.assert_close(out, model(x.float(), r))


@pytest.mark.parametrize(("form", "function"), ((Called, "group_norm"), (Literal, "silu")))
def test_another_function_under_its_name_is_left_to_the_long_way(
    form: type[Children], function: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, again = short(form, calls)
    monkeypatch.setattr(F, function, lambda x, *given: x)
    assert again() is None


@pytest.mark.parametrize(
    "residual", (None, drawn().bfloat16(), drawn()[:1], torch.empty(2, CHANNELS, 3, 5, device="meta"))
)
def test_a_residual_of_another_kind_is_left_to_the_long_way(residual: Any, calls: Calls) -> None:
    model = randomised(Residual()).eval()
    ours: Any = normswap.apply(model, normswap.plan(model, include=""))
    try:
        theirs: Any = model(drawn(), residual)
    except (TypeError, RuntimeError) as error:
        theirs = type(error)
    try:
        found: Any = ours(drawn(), residual)
    except (TypeError, RuntimeError) as error:
        found = type(error)
    ((one, owner, packed),) = calls
    assert one(owner, packed) is None
    assert found is theirs or found.dtype is theirs.dtype
