"""torch.fx, torch.jit and the ONNX export of a swapped model do what they do with the original."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import L1, Activated, Projection, randomised
from torch import Tensor, nn
from torch.nn.utils import prune

import normswap
from normswap import modules
from normswap.plans import NormswapError

pytestmark = pytest.mark.filterwarnings("ignore")


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class Own(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class InTwo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, 3)


SITES: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "LayerNorm without affine": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "RMSNorm": lambda: nn.RMSNorm(6, eps=1e-6),
    "InstanceNorm1d": lambda: nn.Sequential(InTwo(), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "RMSNorm by hand": ByHand,
    "L1": L1,
    "subclass": lambda: Own(6),
    "projection": lambda: Projection(6, 6),
    "activation": lambda: Activated(2, 6),
    "sequential": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "activation in a sequential": lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU()),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    model = randomised(nn.Sequential(nn.Linear(6, 6), SITES[name]())).eval()
    swapped = normswap.optimize(model, torch.randn(8, 6))
    assert normswap.report(swapped).swapped
    return model, swapped, torch.randn(8, 6)


@pytest.mark.parametrize("name", SITES)
def test_fx_traces_it(name: str) -> None:
    model, swapped, x = pair(name)
    expected, traced = torch.fx.symbolic_trace(model), torch.fx.symbolic_trace(swapped)
    torch.testing.assert_close(traced(x), model(x))
    assert Counter(n.target for n in traced.graph.nodes) == Counter(n.target for n in expected.graph.nodes)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)


class KeywordOnly(Norm):
    def forward(self, x: Tensor, *, residual: Tensor, scale: float = 2.0) -> Tensor:
        return F.relu(self.norm(x + residual)) * scale


class Starred(Norm):
    def forward(self, *args: Tensor) -> Tensor:
        (x,) = args
        return F.relu(self.norm(x))


class DoublyStarred(Norm):
    def forward(self, x: Tensor, *args: Tensor, scale: float = 2.0, **kwargs: Tensor) -> Tensor:
        return F.relu(self.norm(x)) * scale


@pytest.mark.parametrize("cls", [KeywordOnly, Starred, DoublyStarred])
def test_a_region_in_a_forward_with_parameters_that_fx_rewrites(cls: type[nn.Module]) -> None:
    model, x = randomised(cls()).eval(), torch.randn(8, 6)
    more = {"residual": torch.randn(8, 6)} if cls is KeywordOnly else {}
    swapped = normswap.optimize(model, x, more)
    assert "" in normswap.report(swapped).swapped
    expected, traced = torch.fx.symbolic_trace(model), torch.fx.symbolic_trace(swapped)
    assert [str(n.target) for n in traced.graph.nodes] == [str(n.target) for n in expected.graph.nodes]
    compiled = torch.compile(swapped, backend="eager", fullgraph=True)
    for run in (traced, swapped, compiled, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        torch.testing.assert_close(run(x, **more), model(x, **more))
    assert inspect.signature(type(swapped).forward) == inspect.signature(cls.forward)


def test_the_defaults_of_a_rewritten_forward_are_the_original_s() -> None:
    model, x = randomised(DoublyStarred()).eval(), torch.randn(8, 6)
    swapped = normswap.optimize(model, x)
    torch.testing.assert_close(swapped(x, x, scale=3.0, other=x), model(x, scale=3.0))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        swapped()


def test_what_fx_leaves_whole_stays_swapped() -> None:
    _, swapped, _ = pair("LayerNorm")
    assert type(torch.fx.symbolic_trace(swapped).get_submodule("1")) is modules.LayerNorm


@pytest.mark.parametrize("name", SITES)
def test_it_is_scripted_and_the_model_stays_as_it_was(name: str) -> None:
    model, swapped, x = pair(name)
    torch.jit.script(model)
    classes = [type(module) for module in swapped.modules()]
    scripted = torch.jit.script(swapped)
    assert [type(module) for module in swapped.modules()] == classes
    torch.testing.assert_close(scripted(x), model(x))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))


@pytest.mark.parametrize("name", SITES)
def test_it_is_traced_by_jit(name: str) -> None:
    model, swapped, x = pair(name)
    traced = torch.jit.trace(swapped, x)
    torch.testing.assert_close(traced(x), model(x))
    kinds = [[node.kind() for node in one.inlined_graph.nodes()] for one in (traced, torch.jit.trace(model, x))]
    assert kinds[0] == kinds[1]


# What the exporter asks its backend: a version of the operator for every node of the graph.
@pytest.mark.parametrize("name", [n for n in SITES if n != "RMSNorm"])  # PyTorch's own has no symbol there
def test_the_graph_of_the_legacy_onnx_exporter_has_a_symbol_for_every_node(name: str) -> None:
    model, swapped, x = pair(name)
    kinds = [{node.kind() for node in exported_graph(one, x).nodes()} for one in (model, swapped)]
    assert kinds[0] == kinds[1] and all(kind.startswith(("onnx::", "prim::")) for kind in kinds[1])


def exported_graph(model: nn.Module, x: Tensor) -> torch._C.Graph:
    from torch.onnx import utils

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _, _ = utils._model_to_graph(model, (x,))
    return graph


def test_what_cannot_be_copied_says_how_else() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(
        NormswapError, match=r"model cannot be copied \(RuntimeError: Only Tensors.*\); pass inplace=True"
    ):
        normswap.optimize(model, torch.randn(2, 6))
    assert normswap.report(normswap.optimize(model, torch.randn(2, 6), inplace=True)).swapped == ("1",)
