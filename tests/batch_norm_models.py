"""Models of BatchNorms in training that the tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

CLASSES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class Block(nn.Module):
    """A norm with a residual and a ReLU behind it, then one alone, one in an nn.Sequential, and one with a SiLU."""

    def __init__(self, dims: int, **settings: Any) -> None:
        super().__init__()
        cls = CLASSES[dims]
        self.bn, self.alone = cls(6, **settings), cls(6, **settings)
        self.act = nn.ReLU(inplace=True)
        self.run = nn.Sequential(cls(6, **settings), nn.Hardswish())

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(x)
        out += x
        return self.run(self.alone(self.act(out)))

    def norms(self) -> list[Any]:
        return [self.bn, self.alone, self.run[0]]


class NormAct(nn.BatchNorm2d):
    """As timm writes it."""

    def __init__(self, channels: int, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.drop, self.act = drop or nn.Identity(), act or nn.ReLU(inplace=True)

    def forward(self, x):  # type: ignore[no-untyped-def]
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.momentum is None:
            exponential_average_factor = 0.0
        else:
            exponential_average_factor = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                exponential_average_factor = 1.0 / float(self.num_batches_tracked)
            else:
                exponential_average_factor = self.momentum
        if self.training:
            bn_training = True
        else:
            bn_training = (self.running_mean is None) and (self.running_var is None)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            bn_training,
            exponential_average_factor,
            self.eps,
        )
        x = self.drop(x)
        x = self.act(x)
        return x


def seeded(model: nn.Module) -> nn.Module:
    """``randomised``, BatchNorms of every rank too."""
    randomised(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.num_batches_tracked.fill_(7)
    return model
