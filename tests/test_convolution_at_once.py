"""Convolutions with norms behind them in one step of C++ over a stand-in for the launchers: what is computed, and what
is left to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import compiled, needs_compiler, registered
from convolution_cases import CASES, PROVED
from convolution_models import Block, bn, conv, drawn, residual, swapped_with, written
from cudnn_stand_in import cudnn
from launch_stand_in import LAUNCHED
from launched_checks import DTYPES, LIMITS, MODES, Own, X, assert_left, folded, launched, outcome, put, registered_as
from norm_act_models import NormAct
from torch import Tensor, nn

__all__ = ["compiled", "cudnn", "folded", "launched", "registered"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("launched")]
by_way = pytest.mark.parametrize("way", DTYPES)


@by_way
@pytest.mark.parametrize("name", [name for name in PROVED if CASES[name].dtype is torch.float32])
def test_it_is_the_same_function(name: str, way: str) -> None:
    """No region gets a ReLU that it has not, whatever its plan says."""
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape).contiguous(memory_format=case.layout)
    model, x = model.to(DTYPES[way]), x.to(DTYPES[way])
    fast = swapped_with(model, way)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), **LIMITS[way])


def first_of_a_sum(self: Any, x: Tensor) -> Tensor:
    return F.relu(x + self.bn(self.conv(x)))


def through_a_dropout(self: Any, x: Tensor) -> Tensor:
    return self.act(self.drop(self.bn(self.conv(x))))


SERVED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Block(conv(), bn()),
    "strided": lambda: Block(conv(stride=2, dilation=(2, 1), groups=2, bias=False), bn()),
    "silu": lambda: Block(conv(), bn(), nn.SiLU()),
    "leaky": lambda: Block(conv(), bn(), nn.LeakyReLU(0.3)),
    "hardtanh": lambda: Block(conv(), bn(), nn.Hardtanh(-0.2, 0.4)),
    "not affine": lambda: Block(conv(), nn.BatchNorm2d(6, affine=False)),
    "residual": lambda: written(residual)(conv(), bn()),
    "first of a sum": lambda: written(first_of_a_sum)(conv(), bn()),
    "dropout": lambda: written(through_a_dropout)(conv(), bn()),
    "norm with an activation": lambda: nn.Sequential(conv(), NormAct(nn.SiLU())),
    "norm with a ReLU": lambda: nn.Sequential(conv(), NormAct(nn.ReLU())),
    "sequential": lambda: nn.Sequential(conv(), bn(), nn.ReLU()),
}


IN_A_RELU = (
    *("plain", "strided", "not affine", "residual", "first of a sum", "dropout", "norm with a ReLU", "sequential"),
)


@pytest.mark.parametrize(
    ("way", "name"), [*(("scaled", name) for name in SERVED), *(("fused", name) for name in IN_A_RELU)]
)
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_one_launch_computes_it(way: str, name: str, mode: Any) -> None:
    model = drawn(SERVED[name]).to(DTYPES[way], memory_format=torch.channels_last)
    fast, x = swapped_with(model, way), X.to(DTYPES[way], memory_format=torch.channels_last)
    with mode():
        out, expected = fast(x), model(x)
        assert out.is_inference() == expected.is_inference()
    torch.testing.assert_close(out, expected, **LIMITS[way])
    assert out.stride() == expected.stride() and not out.requires_grad
    assert LAUNCHED == ["convolution"]
    LAUNCHED.clear()
    with mode():
        model.eval(), fast.train()
        fast(x)
    assert LAUNCHED == []


LATER: dict[str, Callable[[Any], object]] = {
    "a hook on the convolution": lambda m: m.conv.register_forward_hook(lambda module, given, out: out * 2),
    "a hook before the norm": lambda m: m.bn.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "a hook on the activation": lambda m: m.act.register_forward_hook(lambda module, given, out: out * 2),
    "another convolution": lambda m: setattr(m, "conv", nn.Sequential(m.conv)),
    "another norm": lambda m: setattr(m, "bn", nn.GroupNorm(2, 6)),
    "another activation": lambda m: setattr(m, "act", nn.Softplus()),
    "norm in training": lambda m: m.bn.train(),
    "hidden on the instance": lambda m: m.__dict__.update(bn=lambda x: x * 3),
    "forward of the norm": put("bn.forward", torch.neg),
    "inner forward": lambda m: setattr(m.conv, "_conv_forward", lambda x, weight, bias: x * 2),
    "padding by a word": put("conv.padding", "same"),
    "a number for a pair": put("conv.stride", 1),
    "padding of zeros no more": lambda m: (
        setattr(m.conv, "padding_mode", "circular"),
        setattr(m.conv, "_reversed_padding_repeated_twice", [1, 1, 1, 1]),
    ),
    "no statistics": registered_as("bn.running_mean", "_buffers", None),
    "statistics of another class": lambda m: m.bn._buffers.update(running_mean=m.bn.running_mean.as_subclass(Own)),
    "weight of another class": lambda m: m.conv._parameters.update(weight=m.conv.weight.as_subclass(Own)),
    "weight of float64": lambda m: m.double(),
    "eps of another type": put("bn.eps", 1),
    "a class over the norm": lambda m: setattr(
        m.bn, "__class__", type("Over", (type(m.bn),), {"forward": lambda self, x: x * 3})
    ),
}


@by_way
@pytest.mark.parametrize("what", LATER)
def test_what_is_another_by_now_is_left_to_python(what: str, way: str) -> None:
    model = drawn(SERVED["plain"]).to(DTYPES[way])
    assert_left(model, swapped_with(model, way), LATER[what], way)


PASSING_LATER: dict[str, Callable[[Any], object]] = {
    "a hook": lambda m: m.drop.register_forward_hook(lambda module, given, out: out * 2),
    "on": lambda m: (m.drop.train(), setattr(m.drop, "p", 1.0)),
    "another": put("drop", nn.Softplus()),
    "hidden on the instance": lambda m: m.__dict__.update(drop=torch.neg),
}


@by_way
@pytest.mark.parametrize("what", PASSING_LATER)
def test_a_child_that_no_longer_hands_on_is_called(what: str, way: str) -> None:
    model = drawn(SERVED["dropout"]).to(DTYPES[way])
    assert_left(model, swapped_with(model, way), PASSING_LATER[what], way)


@by_way
def test_a_function_that_was_replaced_is_called(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = drawn(SERVED["first of a sum"]).to(DTYPES[way]), X.to(DTYPES[way])
    model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
    fast = swapped_with(model, way)
    with torch.no_grad():
        fast(x)
        assert LAUNCHED == ["convolution"]
        monkeypatch.setattr(F, "relu", torch.sigmoid)
        torch.testing.assert_close(fast(x), model(x), **LIMITS[way])
    assert LAUNCHED == ["convolution"]


CALLED = [(nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (nn.BatchNorm2d, "forward"), (nn.ReLU, "forward")]


@by_way
@pytest.mark.parametrize(("cls", "name"), CALLED, ids=lambda v: getattr(v, "__name__", v))
def test_a_method_of_torch_that_was_replaced_is_called(
    cls: Any, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, original = drawn(SERVED["plain"]).to(DTYPES[way]), X.to(DTYPES[way]), getattr(cls, name)
    fast = swapped_with(model, way)
    with torch.no_grad():
        fast(x)
        assert LAUNCHED == ["convolution"]
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda self, *given: original(self, *given) * 2)
            torch.testing.assert_close(fast(x), model(x))
        with monkeypatch.context() as patch:  # the same function, with other code
            patch.setattr(original, "__code__", (lambda self, x, *given: x[:, :6] * 2).__code__)
            torch.testing.assert_close(fast(x), model(x))
    assert LAUNCHED == ["convolution"]


@by_way
@pytest.mark.parametrize("name", ("conv2d", "batch_norm", "relu", "dropout"))
def test_a_function_that_torchs_forwards_call_was_replaced(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a profiler does that counts operations."""
    model, x, original = drawn(SERVED["dropout" if name == "dropout" else "plain"]), X.to(DTYPES[way]), getattr(F, name)
    model = model.to(DTYPES[way])
    fast = swapped_with(model, way)
    with torch.no_grad():
        fast(x)
        assert LAUNCHED == ["convolution"]
        monkeypatch.setattr(F, name, lambda *given, **named: original(*given, **named) * 2)
        torch.testing.assert_close(fast(x), model(x))
    assert LAUNCHED == ["convolution"]


NOT_FUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "float32": lambda model, x: (model.float(), x.float()),
    "a norm of float64": lambda model, x: (model.bn.double(), x),
    "a norm of the other 16 bits": lambda model, x: (model.bn.half(), x),
    "a bias of float32": lambda model, x: (model.conv.register_parameter("bias", nn.Parameter(torch.ones(6))), x),
    "too few channels": lambda model, x: (None, x[:, :4]),
    "no batch": lambda model, x: (None, x[0]),
    "nothing": lambda model, x: (None, x[:0]),
    "no room for the kernel": lambda model, x: (setattr(model.conv, "padding", (0, 0)), x[..., :2]),
    "negative padding": lambda model, x: (setattr(model.conv, "padding", (-1, 0)), x),
    "no groups": lambda model, x: (setattr(model.conv, "groups", 0), x),
    "cuDNN deterministic": lambda model, x: (None, x),
    "cuDNN off": lambda model, x: (None, x),
}


@pytest.mark.parametrize("what", NOT_FUSED)
def test_what_cudnn_is_not_asked(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(SERVED["plain"]).bfloat16()
    fast, x = swapped_with(model, "fused"), X.bfloat16()
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", what == "cuDNN deterministic")
    monkeypatch.setattr(torch.backends.cudnn, "enabled", what != "cuDNN off")
    _, given = NOT_FUSED[what](model, x)
    NOT_FUSED[what](fast, x)
    with torch.no_grad():
        ours, theirs = outcome(fast, given), outcome(model, given)
    assert LAUNCHED == []
    if isinstance(theirs, tuple):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, **LIMITS["fused"])
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("residual_of", (torch.contiguous_format, torch.channels_last))
def test_a_sum_is_laid_out_after_its_first_operand(layout: Any, residual_of: Any) -> None:
    model = drawn(lambda: written(beside)(conv(), bn())).bfloat16()
    fast, x = swapped_with(model, "fused"), X.to(torch.bfloat16, memory_format=layout)
    added = torch.randn_like(x).contiguous(memory_format=residual_of)
    with torch.no_grad():
        for given in (added, added[:1], added.float(), added[..., :1]):
            ours, theirs = (
                outcome(lambda x, given=given: fast(x, given), x),
                outcome(lambda x, given=given: model(x, given), x),
            )
            torch.testing.assert_close(ours, theirs, **LIMITS["fused"])
            assert ours.stride() == theirs.stride()
    assert LAUNCHED == ["convolution"]


def beside(self: Any, x: Tensor, added: Tensor) -> Tensor:
    return F.relu(added + self.bn(self.conv(x)))


def two_in_a_row(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn2(self.conv(self.act(self.bn(self.conv(x))))))


def test_regions_in_a_row_are_a_launch_each() -> None:
    model = drawn(lambda: written(two_in_a_row)(conv(), bn()))
    with torch.no_grad():
        torch.testing.assert_close(swapped_with(model, "scaled")(X), model(X), rtol=1e-5, atol=1e-4)
    assert LAUNCHED == ["convolution"] * 2


@by_way
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_where_something_has_a_say_python_is_asked(mode: str, way: str) -> None:
    model, x = drawn(SERVED["plain"]).to(DTYPES[way]), X.to(DTYPES[way])
    fast = swapped_with(model, way)
    with torch.no_grad():
        expected = model(x)
    expected = expected * 2 if mode == "a hook for all modules" else expected
    torch.testing.assert_close(MODES[mode](fast, x), expected, **LIMITS[way])
    assert LAUNCHED == []
