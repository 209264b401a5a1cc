"""What torch.compile traces of a swapped model on a GPU, told without one: tensors are fakes of a GPU's, nothing is
computed, and no gradient is recorded, for which autograd would ask for the device. One graph, as the original's is, in
every mode and under CUDA's autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import activation_models
import casts_models
import norm_models
import pytest
import rms_models
import torch
from models import randomised
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import normswap

pytestmark = pytest.mark.usefixtures("fresh_caches", "no_autocast")

Made = Callable[[], tuple[nn.Module, Tensor]]


class SumNorm(nn.Module):
    """A residual before a norm, and an activation behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """The activated norm and the sum."""
        x = x + x.flip(0)
        return x + self.act(self.norm(x))


class Adaptive(nn.Module):
    """As in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled and shifted by the first row of each."""
        first = x.narrow(1, 0, 1)
        return self.norm(x) * (1 + first) + first


class OfChannels(nn.Module):
    """As in ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.dw, self.norm, self.fc = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """The residual of a block."""
        return self.fc(self.norm(self.dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2) + x


class BottleneckEnd(nn.Module):
    """A convolution, its norm, the shortcut and a ReLU."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        """As in ResNet."""
        return torch.relu(self.norm(self.conv(x)) + x)


ROWS, IMAGES = (4, 5, 12), (4, 6, 5, 3)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sum, LayerNorm, GELU": (lambda: SumNorm(nn.LayerNorm(12)), ROWS),
    "sum, RMSNorm, GELU": (lambda: SumNorm(nn.RMSNorm(12)), ROWS),
    "adaptive": (Adaptive, ROWS),
    "of channels": (OfChannels, IMAGES),
    "GroupNorm, SiLU": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.SiLU()), IMAGES),
    "InstanceNorm, LeakyReLU": (lambda: nn.Sequential(nn.InstanceNorm2d(6), nn.LeakyReLU()), IMAGES),
    "convolution, BatchNorm, shortcut": (lambda: BottleneckEnd(nn.BatchNorm2d(6)), IMAGES),
    "convolution, GroupNorm, shortcut": (lambda: BottleneckEnd(nn.GroupNorm(2, 6)), IMAGES),
    "Linear, BatchNorm, ReLU": (lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU()), (9, 12)),
    "GroupNorm of timm": (activation_models.NormAct, activation_models.SHAPE),
}


def _made(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Made:
    return lambda: (randomised(make()), torch.randn(shape))


EVERY: dict[str, Made] = {
    **{kind: lambda kind=kind: norm_models.made(kind) for kind in norm_models.NORMS},
    **{cls.__name__: _made(cls, rms_models.shape_for(cls)) for cls in (*rms_models.LAST, *rms_models.CHANNELS)},
    **{f"{name}, fed on": lambda name=name: casts_models.made(name) for name in casts_models.FEEDING},
    **{name: _made(make, shape) for name, (make, shape) in MODELS.items()},
}
UNTRACED = ("precise_by_hand, fed on", "hooked_between, fed on", "block, fed on", "OfChannelsWeighted")
"""Dynamo does not trace the first two; the others index, for which PyTorch asks for the device."""
CASES = {name: made for name, made in EVERY.items() if name not in UNTRACED}
IN_EVAL = ("linear_scale_batch_norm", "convolution, BatchNorm, shortcut", "Linear, BatchNorm, ReLU")
"""In train mode their BatchNorm asks for the device."""


@pytest.fixture
def no_autocast() -> Iterator[None]:
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


def of_a_gpu(model: nn.Module, fakes: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """The model with its tensors there."""
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, t in kept.items():
                if t is not None:
                    to = dtype if t.is_floating_point() else t.dtype
                    with fakes:
                        there = torch.empty(t.shape, dtype=to, device="cuda:0")
                    kept[name] = nn.Parameter(there, requires_grad=False) if isinstance(t, nn.Parameter) else there
    return model


def traced(model: nn.Module, fakes: FakeTensorMode, x: Tensor) -> list[Any]:
    """What Dynamo says of the results, in one graph."""
    graphs = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with fakes:
        torch.compile(model, backend=kept, fullgraph=True)(x)
    (graph,) = graphs
    outputs = graph.graph.find_nodes(op="output")[0].args[0]
    results = [node.meta["example_value"] for node in outputs]
    return [(t.shape, t.dtype, t.device) for t in results]


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("name", "training"),
    [(name, training) for name in CASES for training in (False, True) if not (training and name in IN_EVAL)],
)
def test_one_graph_of_the_original_s_results(name: str, training: bool, dtype: torch.dtype, autocast: bool) -> None:
    model, x = CASES[name]()
    model.train(training)
    swapped = normswap.apply(model, plan := normswap.plan(model))
    assert plan.swaps
    fakes = FakeTensorMode()
    of = torch.float32 if autocast else dtype
    model, swapped = (of_a_gpu(copy.deepcopy(one), fakes, of) for one in (model, swapped))
    with fakes:
        given = torch.empty(x.shape, dtype=dtype, device="cuda:0")
    torch.set_autocast_enabled("cuda", autocast)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    with torch.no_grad():
        expected = traced(model, fakes, given)
        assert traced(swapped, fakes, given) == expected
