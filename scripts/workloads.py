"""The four models the kernels exist for, written as a user would write them, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class L1Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(x)


class GroupNorm(nn.Module):
    def __init__(self, num_groups: int, channels: int) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(num_groups, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.gn(x)


class LinearScaleBatchNorm(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        x = x * self.scale
        return self.bn(x)


@dataclass(frozen=True)
class Workload:
    """A model, its input's shape, and the bytes a pass must move: each input read once, each output written once."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    parameters: int = 0

    @property
    def floor_bytes(self) -> int:
        return 4 * (2 * torch.Size(self.shape).numel() + self.parameters)


def workloads(shrink: int = 1) -> list[Workload]:
    """The four, with the leading dimension divided by ``shrink``."""
    plane = (64, 256, 256)
    return [
        Workload("l1_norm", L1Norm, (32768 // shrink, 65535)),
        Workload("layer_norm", lambda: LayerNorm(plane), (max(1, 16 // shrink), *plane), 2 * 64 * 256 * 256),
        Workload("group_norm", lambda: GroupNorm(8, 64), (max(1, 112 // shrink), 64, 512, 512)),
        Workload("linear_scale_batch_norm", lambda: LinearScaleBatchNorm(4096, 4096), (16384 // shrink, 4096)),
    ]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, biases and running statistics: on fresh ones and zeros a norm that forgets them passes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, mean: float, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for parameter in module.parameters(recurse=False):
                normal(parameter, 1.0 if is_norm and parameter.dim() else 0.0, 0.2 if parameter.dim() < 2 else 0.02)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_mean is not None:
                normal(module.running_mean, 0.0, 0.5)
                module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model
