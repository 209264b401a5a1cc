"""Of what is launched at once, on a CPU: C++ that takes its tensors for those of a GPU, what becomes of a model later,
and modes in which somebody has a say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cudnn_stand_in
import pytest
import torch
from launch_stand_in import LAUNCHED, LAUNCHERS
from test_nodes import compiled_nodes
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from normswap import modules, nodes, ops, reference
from normswap.ops import at_once, dispatch

X = torch.randn(2, 6, 9, 8)
DTYPES = {"scaled": torch.float32, "fused": torch.bfloat16}
"""In which each way is taken here: the stand-in for our kernel is of float32, cuDNN's convolution fuses 16 bits."""
LIMITS: dict[str, Any] = {"scaled": {"rtol": 1e-5, "atol": 1e-4}, "fused": {"rtol": 0.05, "atol": 0.1}}


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
    nodes.call_at_once(compiled_nodes(), "cpu", LAUNCHERS)
    LAUNCHED.clear()
    yield
    nodes.call_at_once(compiled_nodes(), "cpu")
    at_once.serve(None)


class Own(Tensor):
    """What a library may have in a tensor's place."""


def put(path: str, value: Any) -> Callable[[Any], object]:
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, value)


def registered_as(path: str, where: str, value: Any) -> Callable[[Any], object]:
    parent, _, name = path.rpartition(".")
    return lambda model: getattr(model.get_submodule(parent), where).update({name: value})


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


def hooked(fast: Any, x: Tensor) -> Any:
    """With a hook on all modules, that doubles what a ReLU gives."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out * 2 if type(module) is nn.ReLU else None
    )
    try:
        with torch.no_grad():
            return fast(x)
    finally:
        handle.remove()


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
    "a hook for all modules": lambda fast, x: hooked(fast, x),
}
