"""Norms by the statistics of their input in one step of C++ over a stand-in for the launchers: what is launched, what
goes by the dispatcher, and what becomes of an error."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import CALLED, DECLINED, called, compiled, needs_compiler, registered
from launch_stand_in import DECLINED as DECLINES
from launch_stand_in import OF_NORMS, Memory, View, norms_by
from launched_checks import MODES, Own
from models import randomised
from rms_models import ByHand
from test_nodes import compiled_nodes
from torch import Tensor, nn

import normswap
from normswap import nodes, ops
from normswap.ops import at_once, dispatch

__all__ = ["compiled", "registered"]
pytestmark = needs_compiler
LAUNCHED: list[str] = []


def launch(name: str, *given: Any) -> Any:
    """The op's result; not what the dispatcher is asked for."""
    found = called(name, *given)
    LAUNCHED.append(CALLED.pop())
    return found


@pytest.fixture(autouse=True)
def served(registered: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """C++ takes CPU tensors for a GPU's."""
    for seen in (CALLED, DECLINED, LAUNCHED):
        seen.clear()
    monkeypatch.setattr(dispatch, "_direct", {})
    norms_by(launch)
    nodes.call_at_once(compiled_nodes(), "cpu", OF_NORMS)
    yield
    norms_by(None)
    nodes.call_at_once(compiled_nodes(), "cpu")
    at_once.serve(None)


class Sum(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.lin = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.lin(x)
        return total + self.norm(total)


class Behind(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class ByMethod(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Unweighted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


SERVED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "layer_norm": (lambda: nn.LayerNorm(8), (2, 3, 8), "layer_norm"),
    "layer_norm of no weight": (lambda: nn.LayerNorm((3, 8), elementwise_affine=False), (2, 3, 8), "layer_norm"),
    "rms_norm": (lambda: nn.RMSNorm(8), (2, 3, 8), "rms_norm"),
    "group_norm": (lambda: nn.GroupNorm(2, 6), (2, 6, 5), "group_norm"),
    "sum": (lambda: Sum(nn.LayerNorm(8)), (2, 3, 8), "layer_norm_with_options"),
    "sum of rms": (lambda: Sum(nn.RMSNorm(8)), (2, 3, 8), "rms_norm_with_options"),
    "by hand": (lambda: ByHand(8), (2, 3, 8), "rms_norm"),
    "by hand, a sum": (lambda: Sum(ByHand(8)), (2, 3, 8), "rms_norm_with_options"),
    "by hand, with a method": (lambda: ByMethod(8), (2, 3, 8), "rms_norm"),
    "by hand, with a method, a sum": (lambda: Sum(ByMethod(8)), (2, 3, 8), "rms_norm_with_options"),
    "by hand, without a weight": (lambda: Unweighted(), (2, 3, 8), "rms_norm"),
    "activation": (lambda: Behind(nn.LayerNorm(8)), (2, 3, 8), "layer_norm_with_options"),
    "activation of groups": (lambda: Behind(nn.GroupNorm(2, 6)), (2, 6, 5), "group_norm"),
}


def swapped(name: str) -> tuple[nn.Module, Any, Tensor]:
    """The model, that swapped, and an input."""
    make, shape, _ = SERVED[name]
    model = randomised(make())
    return model, normswap.apply(model, normswap.plan(model)), torch.randn(shape)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_it_is_launched(name: str, mode: Any) -> None:
    model, ours, x = swapped(name)
    with mode():
        out, expected = ours(x), model(x)
        assert out.is_inference() == expected.is_inference()
    torch.testing.assert_close(out, expected)
    assert SERVED[name][2] == LAUNCHED[0] and len(LAUNCHED) == 1 and CALLED == []


@pytest.mark.parametrize("name", SERVED)
def test_what_records_gradients_is_launched(name: str) -> None:
    model, ours, x = swapped(name)
    torch.testing.assert_close(ours(x.requires_grad_()), model(x))
    assert [SERVED[name][2]] == LAUNCHED and CALLED == []


@pytest.mark.parametrize("name", SERVED)
def test_what_is_declined_goes_by_the_dispatcher(name: str) -> None:
    model, ours, x = swapped(name)
    norms_by(None)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert [SERVED[name][2]] == CALLED and LAUNCHED == []


@pytest.mark.parametrize("name", ("layer_norm", "rms_norm", "group_norm", "sum", "sum of rms", "activation of groups"))
def test_a_function_that_torchs_forward_calls_was_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, x = swapped(name)
    called = {"sum": "layer_norm", "sum of rms": "rms_norm", "activation of groups": "group_norm"}.get(name, name)
    monkeypatch.setattr(F, called, lambda x, *given: x + 2)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert LAUNCHED == CALLED == []


NOT_LAUNCHED = ("a function mode", "a dispatch mode", "forward mode", "vmap", "a negated view", "a trace")


@pytest.mark.parametrize("mode", (*NOT_LAUNCHED, "a tensor of another class"))
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_where_something_has_a_say_nothing_is_launched(mode: str) -> None:
    model, ours, x = swapped("layer_norm")
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(MODES[mode](ours, x), expected)
    assert LAUNCHED == []


def weights(change: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    return lambda m: m._parameters.update(weight=nn.Parameter(change(m.weight.detach())))


@pytest.mark.parametrize(
    "change",
    (
        weights(lambda w: w.double()),
        weights(lambda w: w[:0]),
        weights(torch._neg_view),
        lambda m: m._parameters.update(weight=m.weight.as_subclass(Own)),
        lambda m: setattr(m, "eps", "small"),
    ),
)
def test_a_weight_that_is_another_by_now(change: Callable[[Any], object]) -> None:
    model, ours, x = swapped("layer_norm")
    DECLINED.update(("layer_norm", "layer_norm_with_options"))
    for one in (model, ours):
        change(one)
    with torch.no_grad():
        assert outcome(ours, x) == outcome(model, x)


def outcome(model: Any, x: Tensor) -> Any:
    try:
        return model(x).tolist()
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        return type(error)


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Memory), ctypes.c_int32)


def _for_ever(call: Any, memory: Any, device: int) -> int:
    sizes, strides = (ctypes.c_int64 * 1)(2**60), (ctypes.c_int64 * 1)(1)
    data = memory.contents.allocate(memory, 0, ctypes.byref(View(None, sizes, strides, 1, 0)))
    return 0 if data else DECLINES


@pytest.mark.parametrize(
    ("launcher", "message"),
    ((_for_ever, "memory|overflow"), (lambda *given: 719, r"layer_norm: .* \(CUDA error 719\)")),
)
def test_an_error_is_raised(launcher: Callable[..., int], message: str) -> None:
    _, ours, x = swapped("layer_norm")
    function = _FUNCTION(launcher)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    nodes.call_at_once(compiled_nodes(), "cpu", (address, *OF_NORMS[1:]))
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        ours(x)


def two_dims(m: Any) -> None:
    m.weight = nn.Parameter(torch.linspace(0.5, 2.0, 24).view(3, 8))


BY_HAND_LATER: dict[str, Callable[[Any], object]] = {
    "another weight": lambda m: setattr(m, "weight", nn.Parameter(torch.linspace(0.5, 2.0, 8))),
    "a weight of two dims": two_dims,
    "a weight of another dtype": lambda m: m._parameters.update(
        weight=nn.Parameter(torch.linspace(0.5, 2.0, 8).double())
    ),
    "eps of another type": lambda m: setattr(m, "variance_epsilon", torch.tensor(1e-3)),
    "another eps": lambda m: setattr(m, "variance_epsilon", 1),
    "true": lambda m: setattr(m, "variance_epsilon", True),
    "a number that C++ does not hold": lambda m: setattr(m, "variance_epsilon", 10**400),
    "a property": lambda m: setattr(ByHand, "variance_epsilon", property(lambda self: 0.5)),
    "none": lambda m: setattr(m, "variance_epsilon", None),
    "eps of the class": lambda m: (m.__dict__.pop("variance_epsilon"), setattr(ByHand, "variance_epsilon", 0.5)),
    "float64": lambda m: m.double(),
}


@pytest.mark.parametrize("what", BY_HAND_LATER)
@pytest.mark.parametrize("make", (lambda: ByHand(8), lambda: Sum(ByHand(8))))
def test_a_norm_by_hand_reads_what_there_is(what: str, make: Callable[[], Any]) -> None:
    model = randomised(make())
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 3, 8)
    with torch.no_grad():
        ours(x)
        assert len(LAUNCHED) == 1
        for one in (model, ours):
            BY_HAND_LATER[what](getattr(one, "norm", one))
        try:
            found, expected = outcome(ours, x), outcome(model, x)
        finally:
            if "variance_epsilon" in vars(ByHand):
                del ByHand.variance_epsilon
    assert isinstance(found, type(expected))
    if isinstance(expected, list):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    else:
        assert found is expected


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("make", (lambda: ByHand(64), lambda: Sum(ByHand(64)), lambda: ByMethod(64)))
def test_a_norm_by_hand_rounds_where_it_did(dtype: torch.dtype, make: Callable[[], Any]) -> None:
    model = randomised(make()).to(dtype)
    if isinstance(model, Sum):
        model.lin = nn.Identity()
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 3, 64).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x), rtol=1e-2, atol=1e-3)
        assert len(LAUNCHED) == 1
        norm = getattr(ours, "norm", ours)
        norm.weight.data = norm.weight.data.float()  # another order of casts
        getattr(model, "norm", model).weight.data = norm.weight.data
        out, expected = ours(x), model(x)
    assert out.dtype is expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(ByMethod(8))
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 3, 8)
    with torch.no_grad():
        ours(x)
        assert len(LAUNCHED) == 1
        monkeypatch.delattr(ByMethod, "_norm")
        for one in (model, ours):
            one.add_module("_norm", nn.Identity())
        assert torch.equal(ours(x), model(x))
    assert len(LAUNCHED) == 1


class ByDefault(ByMethod):
    def _norm(self, x: Tensor, eps: float = 1e-6) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_a_default_that_is_another_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(ByDefault(8))
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        monkeypatch.setattr(ByDefault._norm, "__defaults__", (0.5,))
        torch.testing.assert_close(ours(x), model(x))


def test_without_elements() -> None:
    model, ours, _ = swapped("by hand")
    x = torch.empty(0, 8)
    with torch.no_grad():
        assert outcome(ours, x) == outcome(model, x) == []


@pytest.mark.parametrize("where", ("class", "instance"))
def test_a_method_that_is_another_by_now(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(ByMethod(8))
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 3, 8)
    with torch.no_grad():
        ours(x)
        assert len(LAUNCHED) == 1
        if where == "class":
            monkeypatch.setattr(ByMethod, "_norm", lambda self, x: x * 3)
        else:
            for one in (model, ours):
                one.__dict__["_norm"] = lambda x: x * 3
        assert torch.equal(ours(x), model(x))
    assert len(LAUNCHED) == 1


def root_of(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * root_of(x)


class ByFlag(ByHand):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scaled = True

    def forward(self, x: Tensor) -> Tensor:
        out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * out if self.scaled else out


class OfChannels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)


ASKED_IN_PYTHON: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, pytest.MonkeyPatch], object]]] = {
    "a function": (ByFunction, lambda m, patch: patch.setitem(globals(), "root_of", lambda x: x)),
    "a flag": (lambda: ByFlag(8), lambda m, patch: setattr(m, "scaled", False)),
    "another dim": (OfChannels, lambda m, patch: None),
}


@pytest.mark.parametrize("what", ASKED_IN_PYTHON)
def test_a_norm_by_hand_of_which_more_is_to_be_asked(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = ASKED_IN_PYTHON[what]
    model = randomised(make())
    ours, x = normswap.apply(model, plan := normswap.plan(model)), torch.randn(2, 3, 8)
    assert plan.swaps
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        for one in (model, ours):
            change(one, monkeypatch)
        torch.testing.assert_close(ours(x), model(x))
    assert LAUNCHED == []


@pytest.mark.parametrize("name", ("by hand", "by hand, with a method"))
def test_nothing_else_computes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, x = swapped(name)
    monkeypatch.setattr(ops, "rms_norm", lambda *given, **more: pytest.fail("it went the long way"))
    with torch.no_grad():
        ours(x)
    assert LAUNCHED == ["rms_norm"]


def test_a_compiler_sees_the_statements_of_a_norm_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, x = swapped("by hand")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert LAUNCHED == []


def test_too_many_arguments_are_the_original_s_error() -> None:
    model, ours, x = swapped("by hand")
    with torch.no_grad():
        for one in (model, ours):
            with pytest.raises(TypeError):
                one(x, x)
    assert LAUNCHED == []


def test_a_forward_that_somebody_has_kept_is_the_original_s_after_revert() -> None:
    model, ours, x = swapped("by hand")
    kept = ours.forward
    normswap.revert(ours)
    with torch.no_grad():
        assert torch.equal(kept(x), model(x))
    assert LAUNCHED == []


def test_a_plan_of_another_forward_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(ByHand(8))
    plan, x = normswap.plan(model), torch.randn(2, 3, 8)
    monkeypatch.setattr(ByHand, "forward", ByFlag.forward)
    model.scaled = False
    ours: Any = normswap.apply(model, plan)
    with torch.no_grad():
        assert torch.equal(ours(x), model(x))
    assert LAUNCHED == []
