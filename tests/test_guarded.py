"""A forward with regions whose guards C++ asks: it sees whatever Python sees, and runs what Python would."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_nodes import compiled_nodes
from torch import Tensor, nn

import normswap
from normswap import nodes
from normswap.ops import at_once
from normswap.ops.at_once import AtOnce, Guarded

X = torch.randn(4, 6)


@pytest.fixture(scope="module", autouse=True)
def in_cpp() -> Iterator[None]:
    """For tensors on a GPU, so that only the guards are asked here."""
    nodes.call_at_once(compiled_nodes(), "cuda")
    yield
    at_once.serve(None)


class Block(nn.Module):
    """With a condition, a child beside a region and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gn, self.lin = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Linear(6, 6)
        self.drop: Any = None

    def forward(self, x: Tensor, times: float = 1.0, *, by: float = 1.0) -> Tensor:
        y = self.norm(x)
        if self.drop is not None:
            y = self.drop(y)
        y = F.relu(y)
        z = self.gn(y)
        t = self.lin(y)
        return (F.relu(z) + t) * times * by


class Modulated(nn.Module):
    """With a function that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        return modulate(self.norm(x), shift, scale)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def row() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU())


MAKE: dict[str, Callable[[], nn.Module]] = {"block": Block, "modulated": Modulated, "row": row}


def swapped(name: str) -> Any:
    model = MAKE[name]().eval()
    plan = normswap.plan(model)
    assert "regions" in plan.swaps[0].match.attributes
    return normswap.apply(model, plan)


def guard_of(model: nn.Module) -> AtOnce:
    forward: Any = type(model).forward
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))
    found = cells["_normswap_forward"].cell_contents
    assert isinstance(found, AtOnce) and isinstance(found.norm, Guarded) and found.serves()
    return found


def telling(model: nn.Module, tell: Callable[..., Any] = lambda name, args, kwargs: name) -> Any:
    """The guard of a model with what tells which of the two forwards it runs."""
    one = guard_of(model).norm
    assert isinstance(one, Guarded)
    answers: Any = {name: lambda *a, name=name, **k: tell(name, a, k) for name in ("rewritten", "otherwise")}
    return dataclasses.replace(one, **answers).made(at_once._calls)


def put_on(cls: str, name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], object]:
    """On a class, the swapped one or another."""
    return lambda model, patch: patch.setattr(
        {"swapped": type(model), "original": type(model).__mro__[2], "module": nn.Module}[cls],
        name,
        value,
        raising=False,
    )


def in_globals(model: nn.Module, patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    patch.setitem(type(model).forward.__globals__, name, value)


def other(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x * 3


def hook(*_: Any) -> None:
    return None


SEEN: dict[str, tuple[str, Callable[[Any, pytest.MonkeyPatch], object]]] = {
    "a condition": ("block", lambda m, p: setattr(m, "drop", nn.Identity())),
    "a condition of another type": ("block", lambda m, p: setattr(m, "drop", 0)),
    "another forward": ("block", put_on("original", "forward", other)),
    "other code": ("block", lambda m, p: p.setattr(Block.forward, "__code__", other.__code__)),
    "other defaults": ("block", lambda m, p: p.setattr(Block.forward, "__defaults__", (2.0,))),
    "no defaults": ("block", lambda m, p: p.setattr(Block.forward, "__defaults__", None)),
    "other named defaults": ("block", lambda m, p: p.setattr(Block.forward, "__kwdefaults__", {"by": 2.0})),
    "named defaults of other names": ("block", lambda m, p: p.setattr(Block.forward, "__kwdefaults__", {"at": 1.0})),
    "no named defaults": ("block", lambda m, p: p.setattr(Block.forward, "__kwdefaults__", None)),
    "a child on the instance": ("block", lambda m, p: m.__dict__.update(norm=F.relu)),
    "a child on the class": ("block", put_on("original", "norm", F.relu)),
    "a child beside on the class": ("block", put_on("swapped", "lin", F.relu)),
    "another reading of attributes": ("block", put_on("original", "__getattr__", lambda self, name: F.relu)),
    "every reading of attributes": (
        "block",
        put_on("original", "__getattribute__", lambda self, name: object.__getattribute__(self, name)),
    ),
    "another way to call modules": ("block", put_on("module", "__call__", nn.Module._call_impl)),
    "another way behind that": ("block", put_on("module", "_call_impl", lambda self, *a, **k: self.forward(*a, **k))),
    "a hook beside": ("block", lambda m, p: m.lin.register_forward_hook(hook)),
    "another child beside": ("block", lambda m, p: setattr(m, "lin", nn.ReLU())),
    "no child beside": ("block", lambda m, p: m._modules.pop("lin")),
    "a hook of all": ("block", lambda m, p: p.setattr(nn.modules.module, "_global_forward_hooks", {0: hook})),
    "it was put back": ("block", lambda m, p: setattr(m, "__class__", Block)),
    "another function": ("modulated", lambda m, p: in_globals(m, p, "modulate", lambda x, shift, scale: x)),
    "no function": ("modulated", lambda m, p: p.delitem(type(m).forward.__globals__, "modulate")),
    "other code of the function": (
        "modulated",
        lambda m, p: p.setattr(modulate, "__code__", (lambda x, shift, scale: x).__code__),
    ),
    "defaults of the function": ("modulated", lambda m, p: p.setattr(modulate, "__defaults__", (X,))),
    "another order": ("row", put_on("original", "__iter__", lambda self: iter([]))),
    "another forward of a row": ("row", put_on("original", "forward", other)),
}
"""What Python sees, by the model that it is done to."""


@pytest.mark.parametrize("change", SEEN)
def test_what_python_sees(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, do = SEEN[change]
    model = swapped(name)
    call = telling(model)
    assert [call(model), call(model)] == ["rewritten", "rewritten"]  # the first time it has no verdicts yet
    with monkeypatch.context() as patch:
        do(model, patch)
        assert call(model) == "otherwise"


@pytest.mark.parametrize("name", MAKE)
def test_arguments_go_through_as_they_are(name: str) -> None:
    model = swapped(name)
    call = telling(model, lambda *told: told)
    assert call(model, X) == ("rewritten", (model, X), {})
    assert call(model, x=X, by=2.0) == ("rewritten", (model,), {"x": X, "by": 2.0})
    assert call(model, X, 1, 2, by=3, at=4) == ("rewritten", (model, X, 1, 2), {"by": 3, "at": 4})
    with pytest.raises(TypeError):
        guard_of(model).call()


def test_it_computes_what_the_original_does() -> None:
    scale = torch.rand(4, 6)
    for name, args, kwargs in (
        ("block", (X,), {"by": 2.0}),
        ("modulated", (X[:, None], scale, scale), {"other": scale}),
        ("row", (X,), {}),
    ):
        model = swapped(name)
        ours = model(*args, **kwargs)
        with normswap.disabled(model):
            theirs = model(*args, **kwargs)
        torch.testing.assert_close(ours, theirs)
        assert guard_of(model).serves()
        torch.testing.assert_close(model.forward(*args, **kwargs), theirs)


def test_what_a_condition_raises_comes_out() -> None:
    model = swapped("block")
    del model.drop
    for _ in range(2):
        with pytest.raises(AttributeError, match="drop"):
            model(X)


class Asks(nn.Module):
    """Whose condition is asked on one way alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.every, self.twice = nn.LayerNorm(6), True, False

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(x))
        if self.every:
            return y
        if self.twice:
            y = y * 2
        return y


@pytest.mark.parametrize("way", ("C++", "Python"))
def test_a_condition_that_is_not_asked_may_be_gone(way: str) -> None:
    model = Asks()
    ours = normswap.apply(model, normswap.plan(model))
    if way == "Python":
        at_once.serve(None)
    try:
        del model.twice, ours.twice
        torch.testing.assert_close(ours(X), model(X))
        model.every = ours.every = False
        for one in (model, ours):
            with pytest.raises(AttributeError, match="twice"):
                one(X)
    finally:
        nodes.call_at_once(compiled_nodes(), "cuda")


def test_a_trace_writes_down_the_original() -> None:
    model = swapped("block")
    seen = list[str]()
    call = telling(model, lambda name, args, kwargs: (seen.append(name), args[1])[1])  # type: ignore[func-returns-value]
    torch.jit.trace(lambda x: call(model, x), X, check_trace=False)
    assert seen == ["otherwise"]
    call(model, X)
    assert seen == ["otherwise", "rewritten"]


def test_a_class_put_over_ours_is_still_swapped() -> None:
    model = swapped("block")
    model.__class__ = types.new_class("Over", (type(model),))
    assert telling(model)(model) == "rewritten"


def test_without_cpp_python_asks() -> None:
    model = swapped("block")
    guard = guard_of(model)
    at_once.serve(None)
    assert not guard.serves() and guard.call is guard.without
    ours = model(X)
    nodes.call_at_once(compiled_nodes(), "cuda")
    assert guard.serves()
    torch.testing.assert_close(model(X), ours)
