"""Convolutions with norms behind them, and BatchNorms in eval, that C++ launches past the dispatcher: that it does, and
what it leaves to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import Block, drawn, swapped_with, written
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normswap import native, nodes
from normswap.ops import at_once, dispatch


def images(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").half().contiguous(memory_format=torch.channels_last)


def residual(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(x)) + self.shortcut)


def made(forward: Any = Block.forward) -> Any:
    model = drawn(lambda: written(forward)(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)))
    return model.cuda().half().to(memory_format=torch.channels_last)


def ops_of(call: Callable[[], object]) -> list[str]:
    """Our ops, as the profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return [event.name for event in seen.events() if event.name.startswith("normswap::")]


def outcome(model: Any, x: Tensor) -> Any:
    try:
        return model(x)
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)


def assert_same(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, type(theirs))
    if isinstance(theirs, type):
        assert ours is theirs
        return
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=5e-3, atol=2e-2)


def test_it_is_served() -> None:
    assert native.available() and not nodes.status().startswith("none")
    model, x = made(), images(2, 16, 9, 8)
    fast = swapped_with(model, "scaled")
    with torch.no_grad():
        assert ops_of(lambda: fast(x)) == ["normswap::convolution_batch_norm_eval"]
        assert_same(fast(x), model(x))
        given = model.bn.running_mean, model.bn.running_var, model.bn.weight, model.bn.bias, 1e-5, None, 0, 0.0, 0.0
        assert ops_of(lambda: dispatch._direct["batch_norm_eval"](x, *given)) == ["normswap::batch_norm_eval"]


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_it_saw() -> None:
    model, x = made(), images(2, 16, 9, 8)
    given = model.bn.running_mean, model.bn.running_var, model.bn.weight, model.bn.bias, 1e-5, None, 0, 0.0, 0.0
    with torch.no_grad(), Watching() as mode:
        dispatch._direct["batch_norm_eval"](x, *given)
    assert any("batch_norm_eval" in name for name in mode.seen)


CHANGED: dict[str, Callable[[Any], object]] = {
    "no bias": lambda m: setattr(m.conv, "bias", None),
    "empty weight": lambda m: m.bn._parameters.update(weight=nn.Parameter(m.bn.weight.detach()[:0])),
    "empty convolution bias": lambda m: m.conv._parameters.update(bias=nn.Parameter(m.conv.bias.detach()[:0])),
    "bias of two dims": lambda m: m.conv._parameters.update(bias=nn.Parameter(m.conv.bias.detach()[:, None])),
    "negative padding": lambda m: setattr(m.conv, "padding", (-1, 0)),
    "no dilation": lambda m: setattr(m.conv, "dilation", (0, 1)),
    "long padding and steps": lambda m: (setattr(m.conv, "padding", (2**20, 1)), setattr(m.conv, "stride", (2**21, 1))),
    "statistics of float64": lambda m: m.bn.double(),
    "weight on the CPU": lambda m: m.conv._parameters.update(weight=nn.Parameter(m.conv.weight.detach().cpu())),
    "eps of another type": lambda m: setattr(m.bn, "eps", 1),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_otherwise_by_now_computes_what_it_did(what: str) -> None:
    model, x = made(), images(2, 16, 9, 8)
    fast = swapped_with(model, "scaled")
    for one in (model, fast):
        CHANGED[what](one)
    with torch.no_grad():
        assert_same(outcome(fast, x), outcome(model, x))


GIVEN: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "as it was": lambda: (images(2, 16, 9, 8), images(2, 16, 9, 8)),
    "contiguous residual": lambda: (images(2, 16, 9, 8), images(2, 16, 9, 8).contiguous()),
    "empty residual": lambda: (images(1, 16, 9, 8), images(0, 16, 9, 8)),
    "residual of no width": lambda: (images(2, 16, 9, 8), images(2, 16, 9, 0)),
    "one value": lambda: (images(2, 16, 9, 8), images(1, 1, 1, 1)),
    "negated": lambda: (torch._neg_view(images(2, 16, 9, 8)), torch._neg_view(images(2, 16, 9, 8))),
    "empty batch": lambda: (images(0, 16, 9, 8), images(0, 16, 9, 8)),
    "starts elsewhere": lambda: (images(3, 16, 9, 8).flatten()[1:1153].view(1, 9, 8, 16).permute(0, 3, 1, 2),) * 2,
    "one pixel": lambda: (images(2, 16, 1, 1), images(2, 16, 1, 1).contiguous()),
    "float32": lambda: (images(2, 16, 9, 8).float(), images(2, 16, 9, 8).float()),
}


SERVED = ("as it was", "starts elsewhere", "one pixel")
"""By the BatchNorm that is given such a residual."""


@pytest.mark.parametrize("what", GIVEN)
def test_whatever_it_is_given(what: str) -> None:
    x, added = GIVEN[what]()
    model = made(residual)
    fast = swapped_with(model, "scaled")
    model.shortcut = fast.shortcut = None
    for one in (model, fast):
        one.__dict__["shortcut"] = added
        one._modules.pop("shortcut", None)
    bn = model.bn
    rest = bn.running_mean, bn.running_var, bn.weight, bn.bias
    with torch.no_grad():
        assert_same(outcome(fast, x), outcome(model, x))
        out = dispatch._direct["batch_norm_eval"](x, *rest, 1e-5, added, 1, 0.0, 0.0)
        assert (out is None) == (what not in SERVED)
        if out is not None:
            assert_same(out, F.relu(F.batch_norm(x, *rest, False, 0.0, 1e-5) + added))


def test_streams_and_graphs() -> None:
    model, x = made(), images(4, 16, 33, 32)
    fast = swapped_with(model, "scaled")
    with torch.no_grad():
        expected = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = fast(x)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(x)
        x.mul_(2.0)
        graph.replay()
        assert_same(out, model(x))


def test_without_cpp_the_way_is_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(), images(2, 16, 9, 8)
    fast = swapped_with(model, "scaled")
    with torch.no_grad():
        quick = fast(x)
        for one in list(at_once._every):
            monkeypatch.setattr(one, "call", one.without)
        assert torch.equal(fast(x), quick)
