"""Norms by the statistics of their input that C++ launches past the dispatcher: that it does, with any layout, dtype
and workspace, and what it leaves to the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rms_models import ByHand
from test_launched import ops_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import normswap


class Sum(nn.Module):
    """A sum, its norm and what is behind that."""

    def __init__(self, norm: nn.Module, act: bool = False) -> None:
        super().__init__()
        self.norm, self.act, self.beside = norm, act, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.beside(x)
        out = self.norm(total)
        return total + (F.silu(out) if self.act else out)


class Behind(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.relu(self.norm(x) + residual)


def drawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    for tensor in module.parameters():
        nn.init.uniform_(tensor, 0.5, 1.5)
    return module.cuda().to(dtype).eval()


def swapped(module: nn.Module) -> Any:
    return normswap.apply(module, normswap.plan(module))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "layer_norm": (lambda: nn.LayerNorm(768), (4, 9, 768), "layer_norm"),
    "layer_norm of an odd row": (lambda: nn.LayerNorm(13), (4, 9, 13), "layer_norm"),
    "layer_norm of two dims": (lambda: nn.LayerNorm((7, 96), bias=False), (4, 7, 96), "layer_norm"),
    "layer_norm with a workspace": (lambda: nn.LayerNorm(600_000), (2, 600_000), "layer_norm"),
    "rms_norm": (lambda: nn.RMSNorm(2048), (4, 9, 2048), "rms_norm"),
    "by hand": (lambda: ByHand(2048), (4, 9, 2048), "rms_norm"),
    "by hand, a sum": (lambda: Sum(ByHand(768)), (4, 9, 768), "rms_norm"),
    "sum": (lambda: Sum(nn.LayerNorm(768)), (4, 9, 768), "layer_norm"),
    "sum and activation": (lambda: Sum(nn.RMSNorm(768), act=True), (4, 9, 768), "rms_norm"),
    "group_norm": (lambda: nn.GroupNorm(8, 64), (2, 64, 14, 14), "group_norm"),
    "group_norm of odd rows": (lambda: nn.GroupNorm(3, 9), (2, 9, 5, 5), "group_norm"),
    "group_norm with a workspace": (lambda: nn.GroupNorm(2, 16), (1, 16, 300, 300), "group_norm"),
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
    tolerance = TOLERANCE[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NORMS)
def test_one_launch_computes_it(name: str, dtype: torch.dtype) -> None:
    make, shape, op = NORMS[name]
    model, x = drawn(make(), dtype), torch.randn(shape, device="cuda", dtype=dtype)
    ours = swapped(model)
    with torch.no_grad():
        found: list[Tensor] = []
        assert ops_of(lambda: found.append(ours(x))) == [f"normswap::{op}"]
        assert_same(found[0], model(x))
        assert found[0].stride() == model(x).stride()
    with torch.inference_mode():
        assert ours(x).is_inference()


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
def test_groups_with_what_stands_behind_them(layout: torch.memory_format) -> None:
    model = drawn(Behind(nn.GroupNorm(8, 64)), torch.float16)
    x, residual = (torch.randn(2, 64, 14, 14, device="cuda").half().contiguous(memory_format=layout) for _ in range(2))
    ours = swapped(model)
    with torch.no_grad():
        assert ops_of(lambda: ours(x, residual)) == ["normswap::group_norm"]
        assert_same(ours(x, residual), model(x, residual))
        assert_same(ours(x, residual.transpose(2, 3)), model(x, residual.transpose(2, 3)))


EIGHTS = torch.channels_last
IMAGES: dict[str, Callable[[], Tensor]] = {
    "starts elsewhere": lambda: torch.randn(2 * 16 * 16 + 1, device="cuda")[1:].view(2, 4, 4, 16).permute(0, 3, 1, 2),
    "expanded": lambda: torch.randn(1, 16, 4, 4, device="cuda").contiguous(memory_format=EIGHTS).expand(2, 16, 4, 4),
    "expanded, elsewhere": lambda: (
        torch.randn(257, device="cuda")[1:].view(1, 4, 4, 16).permute(0, 3, 1, 2).expand(2, 16, 4, 4)
    ),
    "a part": lambda: torch.randn(2, 16, 4, 8, device="cuda")[..., 1:5],
    "groups too wide for a block": lambda: torch.randn(2, 40_000, 2, 2, device="cuda").contiguous(memory_format=EIGHTS),
}


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("what", IMAGES)
def test_images_that_lie_otherwise(what: str, gradients: bool) -> None:
    x = IMAGES[what]()
    model = drawn(nn.GroupNorm(1 if "wide" in what else 4, x.shape[1]), torch.float32)
    ours = swapped(model)
    given, same = (x.detach().requires_grad_(gradients) for _ in range(2))
    with torch.set_grad_enabled(gradients):
        out, expected = ours(given), model(same)
        assert_same(out, expected)
    if gradients:
        grad = torch.randn_like(expected)
        out.backward(grad), expected.backward(grad)
        torch.testing.assert_close(given.grad, same.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.weight.grad, model.weight.grad, rtol=1e-3, atol=1e-3)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


GIVEN: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(1, 9, 64, device="cuda").expand(4, 9, 64),
    "of an expanded one": lambda: torch.randn(1, 9, 64, device="cuda").expand(4, 9, 64)[:1],
    "of a longer one": lambda: torch.randn(4, 9, 64, device="cuda")[:, :1][:1],
    "transposed": lambda: torch.randn(9, 4, 64, device="cuda").transpose(0, 1),
    "permuted": lambda: torch.randn(4, 64, 9, device="cuda").permute(0, 2, 1),
    "starts elsewhere": lambda: torch.randn(4 * 9 * 64 + 1, device="cuda")[1:].view(4, 9, 64),
    "negated": lambda: torch._neg_view(torch.randn(4, 9, 64, device="cuda")),
    "empty": lambda: torch.randn(0, 9, 64, device="cuda"),
    "one row": lambda: torch.randn(64, device="cuda"),
    "float64": lambda: torch.randn(4, 9, 64, device="cuda", dtype=torch.float64),
    "on the CPU": lambda: torch.randn(4, 9, 64),
}


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("make", (lambda: nn.LayerNorm(64), lambda: Sum(nn.LayerNorm(64)), lambda: ByHand(64)))
def test_whatever_it_is_given(what: str, make: Callable[[], nn.Module]) -> None:
    model, x = drawn(make(), torch.float32), GIVEN[what]()
    ours = swapped(model)

    def outcome(one: Any) -> Any:
        try:
            return one(x)
        except RuntimeError as error:
            return type(error)

    with torch.no_grad():
        found, expected = outcome(ours), outcome(model)
    assert isinstance(found, type(expected))
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("change", (lambda w: w[1:65], lambda w: w[:128:2], lambda w: torch._neg_view(w[:64])))
def test_whatever_its_weight_is(change: Callable[[Tensor], Tensor]) -> None:
    model, x = drawn(nn.LayerNorm(64), torch.float32), torch.randn(4, 64, device="cuda")
    ours = swapped(model)
    weight = nn.Parameter(change(torch.rand(130, device="cuda") + 0.5), requires_grad=False)
    for one in (model, ours):
        one._parameters["weight"] = weight
    with torch.no_grad():
        assert_same(ours(x), model(x))


def test_modes_streams_and_graphs() -> None:
    model = drawn(Sum(nn.LayerNorm(600_000)), torch.float16)
    ours, x = swapped(model), torch.randn(2, 600_000, device="cuda").half()
    with torch.no_grad():
        expected = ours(x)
        with Watching() as mode:
            assert torch.equal(ours(x), expected)
        assert any("normswap" in name for name in mode.seen)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = ours(x)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(out, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours(x)
        x.mul_(2.0)
        graph.replay()
        assert torch.equal(out, ours(x))


def test_no_memory_is_pytorch_s_error() -> None:
    ours = swapped(drawn(nn.LayerNorm(1024), torch.float16))
    row = torch.randn(1, 1024, device="cuda").half()
    free, _ = torch.cuda.mem_get_info()
    x = torch.zeros(free // 2048 * 7 // 10, 1024, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            ours(x)
        del x
        torch.cuda.empty_cache()
        assert ours(row).shape == row.shape
