"""In code that torch.compile makes, the formula stands in the graph unless ours is known to win there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap import ops
from normswap.ops import dispatch, rows


@dataclass
class OnGpu:
    """What ``native_serves`` asks a tensor on a GPU."""

    requires_grad: bool = False
    is_cuda: bool = True
    device: str = "cuda"
    dtype: torch.dtype = torch.float16


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_library_ready", lambda: True)
    monkeypatch.setattr(dispatch, "PLAIN", (OnGpu,))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("elements", "least", "served"),
    [(0, dispatch.LONG_ROW, False), (65534, dispatch.LONG_ROW, False), (65535, dispatch.LONG_ROW, True), (8, 8, True)],
)
def test_from_a_length_on_ours_serves_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch, elements: int, least: int, served: bool
) -> None:
    x: Any = OnGpu()
    assert dispatch.native_serves(x, elements=elements, least=least)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.native_serves(x, elements=elements, least=least) == served


@pytest.mark.usefixtures("library")
def test_not_where_gradients_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x: Any = OnGpu()
    learns: Any = OnGpu(requires_grad=True)
    assert not dispatch.native_serves(x, learns, elements=2**20)
    with torch.no_grad():
        assert dispatch.native_serves(x, learns, elements=2**20)


@pytest.mark.parametrize(("kind", "affine"), [("layer_norm", (None, None)), ("rms_norm", (None,))])
def test_a_plain_norm_makes_no_options(kind: str, affine: tuple[None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Dynamo of torch 2.11 cannot make within a graph."""
    given: list[Any] = []
    op = SimpleNamespace(default=lambda *args: given.extend(args))
    monkeypatch.setattr(torch.ops.normswap, kind, op, raising=False)
    monkeypatch.setattr(rows, "Options", lambda *args: pytest.fail("it made some"))
    assert rows.computed(kind, torch.randn(3, 5), (5,), affine, (1e-5,)).shape == (3, 5)
    behind = 3 + len(affine)
    assert given[behind : behind + 6] == [None, None, None, 0, 0.0, 0.0]


def test_under_autocast_no_op_is_asked_for_that_compiled_code_never_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.10 ended its graph at what that op was to be given."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    module = sys.modules["normswap.ops.layer_norm"]
    monkeypatch.setattr(module, "layer_norm_directly", lambda *given: pytest.fail("it was asked for"))
    torch.set_autocast_enabled("cuda", True)
    try:
        x = torch.randn(3, 5, dtype=torch.bfloat16)
        torch.testing.assert_close(ops.layer_norm(x, (5,)), torch.nn.functional.layer_norm(x, (5,)))
    finally:
        torch.set_autocast_enabled("cuda", False)


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "layer_norm": (lambda x: ops.layer_norm(x, (6, 5)), 30, dispatch.LONG_ROW),
    "rms_norm": (lambda x: ops.rms_norm(x, (5,)), 5, dispatch.LONG_ROW),
    "l1_norm": (lambda x: ops.l1_norm(x, -1), 5, dispatch.LONG_ROW),
    "group_norm": (lambda x: ops.group_norm(x, 2), 4 // 2 * 30, dispatch.LARGE_GROUP),
    "instance_norm": (lambda x: ops.instance_norm(x), 30, dispatch.LARGE_GROUP),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_op_says_over_how_many_elements_its_statistic_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, elements, least = CALLS[name]
    asked = []

    def native_serves(*tensors: Tensor, elements: int = 0, least: int = dispatch.LONG_ROW) -> bool:
        asked.append((elements, least))
        return False

    module = {"layer_norm": "rows", "rms_norm": "rows", "instance_norm": "group_norm"}.get(name, name)
    monkeypatch.setattr(sys.modules[f"normswap.ops.{module}"], "native_serves", native_serves)
    call(torch.randn(3, 4, 6, 5))
    assert asked == [(elements, least)]


def test_along_another_dim_than_the_last_the_formula_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        sys.modules["normswap.ops.l1_norm"], "native_serves", lambda *tensors, elements: asked.append(elements)
    )
    ops.l1_norm(torch.randn(4, 6, 5), 1)
    assert asked == [1]
    assert ops.l1_norm(torch.tensor(-2.0)).item() == -1.0


class ByHand(nn.Module):
    """An RMSNorm as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def operations(model: nn.Module, x: Tensor) -> list[str]:
    """What torch.compile is given of a run without gradients, in one graph."""
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
    (one,) = found
    return one


def test_of_a_norm_by_hand_its_own_statements_are_compiled() -> None:
    """Another formula of the same norm is not fused alike."""
    model, x = ByHand(8).to(torch.bfloat16), torch.randn(3, 8, dtype=torch.bfloat16)
    swapped = normswap.optimize(model, x, validate="off")
    assert normswap.modules.site_match(swapped) is not None
    assert operations(swapped, x) == operations(model, x)
    long = torch.randn(2, dispatch.LONG_ROW, dtype=torch.bfloat16)
    wide = normswap.optimize(ByHand(dispatch.LONG_ROW).to(torch.bfloat16), long, validate="off")
    assert any("rms_norm" in name for name in operations(wide, long))
