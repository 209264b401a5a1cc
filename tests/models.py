"""Models that the tests of the proof share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class L1(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class Projection(nn.Module):
    def __init__(self, features: int, channels: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.gemm = nn.Linear(features, channels)
        self.scale = nn.Parameter(torch.randn(channels))
        self.bn = nn.BatchNorm1d(channels, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


class Activated(nn.Module):
    """SiLU of a GroupNorm."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, num_channels, eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class Flagged(nn.LayerNorm):
    """A LayerNorm that may be another function, as timm's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.fast = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fast:
            return x
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Every(nn.Module):
    """One site of each kind, dropout and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, 6)
        self.layer = nn.LayerNorm((6, 5))
        self.projection = Projection(30, 16)
        self.l1 = L1()
        self.rms = nn.RMSNorm(16, eps=1e-6)
        self.drop = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layer(self.group(x)).flatten(1)
        return self.drop(self.rms(self.l1(self.projection(x))))


def randomised(model: nn.Module) -> nn.Module:
    """Random weights, biases and running statistics."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.num_batches_tracked.fill_(7)
    return model
