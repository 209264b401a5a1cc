"""Random models of right kernels: for the claim that the proof puts no site back for its error."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from models import L1, Projection, randomised
from torch import Tensor, nn

import normswap


class Activated(nn.Module):
    """Linear, scale, BatchNorm, a residual and an activation."""

    def __init__(self, width: int, scale: float, act: nn.Module) -> None:
        super().__init__()
        self.gemm, self.bn, self.act = nn.Linear(width, width), nn.BatchNorm1d(width), act
        self.scale = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.gemm(x) * self.scale) + x)


class Residual(nn.Module):
    """A random stack over (N, T, D) or (N, D): norms, linears and nonlinearities, some with a skip."""

    def __init__(self, blocks: list[nn.Module], skips: list[bool]) -> None:
        super().__init__()
        self.blocks, self.skips = nn.ModuleList(blocks), skips

    def forward(self, x: Tensor) -> Tensor:
        for block, skip in zip(self.blocks, self.skips, strict=True):
            y = block(x)
            x = x + y if skip and y.shape == x.shape else y
        return x


def random_model(seed: int) -> tuple[nn.Module, Tensor]:
    """A model of three to nine blocks and an input for it: random widths, eps, affine, offsets and scales of the input
    (a mean of up to 1000, a spread from 1e-3 to 1e3), random weights and statistics."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    convolutional = draw.random() < 0.3
    blocks = [_image_block, _row_block][not convolutional]
    width = draw.choice((4, 8, 24, 33, 64, 100, 257) if not convolutional else (4, 8, 24, 32))
    made = [blocks(draw, width) for _ in range(draw.randint(3, 9))]
    model = randomised(Residual(made, [draw.random() < 0.4 for _ in made]))
    shape = (
        (draw.randint(2, 6), width, draw.randint(1, 9), draw.randint(2, 9))
        if convolutional
        else (
            draw.randint(2, 40),
            width,
        )
    )
    x = torch.randn(shape) * 10 ** draw.uniform(-3, 3) + draw.choice((0, 0, 1, 100, 1000))
    return model, x


def _row_block(draw: random.Random, width: int) -> nn.Module:
    eps, affine = draw.choice((1e-5, 1e-6, 1e-3, 0.1)), draw.random() < 0.8
    groups = draw.choice([g for g in range(1, width + 1) if width % g == 0 and width // g > 1])
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.LayerNorm(width, eps, affine, bias=draw.random() < 0.7),
        lambda: nn.RMSNorm(width, draw.choice((None, eps)), affine),
        lambda: nn.GroupNorm(groups, width, eps, affine),
        L1,
        lambda: Projection(width, width, draw.choice((None, 0.1, 0.3))),
        lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
        lambda: Activated(width, 0.5, draw.choice((nn.ReLU(), nn.GELU()))),
        lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, eps), nn.SiLU()),
        lambda: nn.Tanh(),
    ]
    return draw.choice(choices)()


def _image_block(draw: random.Random, width: int) -> nn.Module:
    groups = draw.choice([g for g in range(1, width + 1) if width % g == 0])
    choices: list[Callable[[], nn.Module]] = [
        lambda: nn.GroupNorm(groups, width, draw.choice((1e-5, 1e-3)), draw.random() < 0.8),
        L1,
        lambda: nn.Conv2d(width, width, 3, padding=1),
        lambda: nn.ReLU(),
    ]
    return draw.choice(choices)()


def false_alarms(seed: int, device: str, dtype: torch.dtype, training: bool) -> tuple[list[dict[str, Any]], int]:
    """The rows of the sites that were put back for their error, and how many sites there were."""
    model, x = random_model(seed)
    model, x = model.to(device, dtype).train(training), x.to(device, dtype)
    if dtype is torch.float16:
        x = x.clamp(-6e4, 6e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model, x, on_mismatch="warn", min_speedup=None)
    rows = [row for row in normswap.report(swapped).rows if row["status"] != "refused"]
    return [row for row in rows if row["status"] == "failed"], len(rows)
