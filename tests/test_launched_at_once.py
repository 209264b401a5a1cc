"""Convolutions with norms behind them, and BatchNorms by running statistics, in one step of C++ over a stand-in for the
launchers: what is computed, and what is left to Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cudnn_stand_in
import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import compiled, needs_compiler, registered
from convolution_cases import CASES, PROVED
from convolution_models import Block, bn, conv, drawn, residual, swapped_with, written
from cudnn_stand_in import cudnn
from launch_stand_in import LAUNCHED, LAUNCHERS
from norm_act_models import NormAct
from test_nodes import nodes_library
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import normswap
from normswap import modules, nodes, ops, reference
from normswap.activation import CODES
from normswap.ops import at_once, dispatch

__all__ = ["compiled", "cudnn", "registered"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("launched")]
X = torch.randn(2, 6, 9, 8)
DTYPES = {"scaled": torch.float32, "fused": torch.bfloat16}
"""In which each way is taken here: the stand-in for our kernel is of float32, cuDNN's convolution fuses 16 bits."""
LIMITS: dict[str, Any] = {"scaled": {"rtol": 1e-5, "atol": 1e-4}, "fused": {"rtol": 0.05, "atol": 0.1}}
by_way = pytest.mark.parametrize("way", DTYPES)


@pytest.fixture(scope="module")
def folded(registered: None, compiled: torch.library.Library) -> None:
    """A fold for a CPU's tensors."""

    def fold(weight: Tensor, bias: Any, *norm: Any) -> Any:
        return reference.fold_scale_batch_norm(weight, bias, None, *norm)

    compiled.impl("fold_convolution_or_none", fold, "CPU")


@pytest.fixture
def launched(cudnn: None, folded: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """C++ takes CPU tensors for a GPU's."""
    monkeypatch.setattr(dispatch, "_direct", {})
    monkeypatch.setattr(cudnn_stand_in, "CALLED", LAUNCHED)
    monkeypatch.setattr(modules, "_made", WeakIdKeyDictionary())  # those of other tests know what cuDNN fuses
    monkeypatch.setattr(ops.convolution, "FUSED", (torch.float16, torch.bfloat16))
    nodes.call_at_once(nodes_library(), "cpu", LAUNCHERS)
    LAUNCHED.clear()
    yield
    nodes.call_at_once(nodes_library(), "cpu")
    at_once.serve(None)


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


class Own(Tensor):
    """What a library may have in a tensor's place."""


def put(path: str, value: Any) -> Callable[[Any], object]:
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, value)


def registered_as(path: str, where: str, value: Any) -> Callable[[Any], object]:
    parent, _, name = path.rpartition(".")
    return lambda model: getattr(model.get_submodule(parent), where).update({name: value})


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


def outcome(model: Any, x: Tensor) -> Any:
    try:
        return model(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        return type(error), str(error).partition("\n")[0]


def assert_left(model: Any, fast: Any, change: Callable[[Any], object], way: str = "scaled") -> None:
    """After the change Python does what the original does."""
    x = X.to(DTYPES[way])
    with torch.no_grad():
        fast(x)
        assert len(LAUNCHED) == 1
        for one in (model, fast):
            change(one)
        LAUNCHED.clear()
        ours, theirs = outcome(fast, x), outcome(model, x)
    assert LAUNCHED == []
    assert ours == theirs if isinstance(theirs, tuple) else torch.allclose(ours, theirs, **LIMITS[way])


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


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeenBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(context: Callable[[], Any]) -> Callable[[Any, Tensor], Any]:
    def call(fast: Any, x: Tensor) -> Any:
        with torch.no_grad(), context():
            return fast(x)

    return call


MODES: dict[str, Callable[[Any, Tensor], Any]] = {
    "gradients": lambda fast, x: fast(x).detach(),
    "a function mode": run(Seen),
    "a dispatch mode": run(SeenBelow),
    "autocast": run(autocast),
    "deterministic algorithms": run(deterministic),
    "forward mode": run(forward_ad.dual_level),
    "vmap": lambda fast, x: torch.no_grad()(torch.vmap(fast))(x[None])[0],
    "a tensor of another class": lambda fast, x: torch.no_grad()(fast)(x.as_subclass(Own)).as_subclass(Tensor),
    "a negated view": lambda fast, x: torch.no_grad()(fast)(torch._neg_view(-x)),
    "a trace": lambda fast, x: torch.jit.trace(fast, x, check_trace=False)(x).detach(),
    "a hook for all modules": lambda fast, x: _hooked(fast, x),
}


def _hooked(fast: Any, x: Tensor) -> Any:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out * 2 if type(module) is nn.ReLU else None
    )
    try:
        with torch.no_grad():
            return fast(x)
    finally:
        handle.remove()


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


# --- BatchNorm by running statistics --------------------------------------------------------------------------------


def statistics() -> tuple[Tensor, ...]:
    return torch.randn(6), torch.rand(6) + 0.5, torch.randn(6), torch.randn(6)


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("added", (False, True))
def test_a_batch_norm_by_running_statistics(layout: torch.memory_format, affine: bool, added: bool) -> None:
    x = X.contiguous(memory_format=layout)
    mean, var, weight, bias = statistics()
    given = (mean, var, weight, bias) if affine else (mean, var, None, None)
    behind = torch.randn_like(x) if added else None
    out = at_once._calls.batch_norm_eval(x, *given, 1e-5, behind, CODES["relu"], 0.0, 0.0)
    expected = F.batch_norm(x, *given, False, 0.0, 1e-5)
    torch.testing.assert_close(out, F.relu(expected if behind is None else expected + behind))
    assert out.stride() == x.stride() and LAUNCHED == ["batch_norm"]


ENDING_LATER: dict[str, Callable[[Any], object]] = {
    "a hook on the activation": lambda m: m.act.register_forward_hook(lambda module, given, out: out * 2),
    "a hook on what hands on": lambda m: m.drop.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "another activation": put("act", nn.Softplus()),
    "a dropout that is on": put("drop", nn.Dropout(1.0)),
    "hidden on the instance": lambda m: m.__dict__.update(act=torch.neg),
    "in training": lambda m: m.train(),
    "no statistics": registered_as("running_mean", "_buffers", None),
    "statistics of another class": lambda m: m._buffers.update(running_mean=m.running_mean.as_subclass(Own)),
    "of float64": lambda m: m.double(),
}


@pytest.mark.parametrize("act", (nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.2)))
def test_a_norm_that_ends_in_an_activation(act: nn.Module) -> None:
    model = drawn(lambda: NormAct(act))
    fast = normswap.apply(model, normswap.plan(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
    assert LAUNCHED == ["batch_norm"] * 2
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)  # with gradients
    with torch.no_grad():
        assert outcome(fast, X[0]) == outcome(model, X[0])
        torch.testing.assert_close(torch.vmap(fast)(X[None]), torch.vmap(model)(X[None]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(_hooked(fast, X), _hooked(model, X), rtol=1e-5, atol=1e-5)
    assert LAUNCHED == ["batch_norm"] * 2


@pytest.mark.parametrize("what", ENDING_LATER)
def test_a_norm_whose_ending_is_another_by_now_is_left_to_python(what: str) -> None:
    model = drawn(NormAct)
    assert_left(model, normswap.apply(model, normswap.plan(model)), ENDING_LATER[what])


def test_what_it_is_not_given_is_left_to_python() -> None:
    given = statistics()
    eval_ = at_once._calls.batch_norm_eval
    for x in (X.double(), X.as_subclass(Own), X.to("meta"), X.to_sparse(), torch._neg_view(X), None):
        assert eval_(x, *given, 1e-5, None, 0, 0.0, 0.0) is None
    assert eval_(X, given[0].to("meta"), *given[1:], 1e-5, None, 0, 0.0, 0.0) is None
    assert LAUNCHED == []
    with pytest.raises(TypeError, match="10 arguments"):
        eval_(X)
