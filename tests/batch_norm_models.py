"""Models of BatchNorms in training that the tests share."""

from __future__ import annotations

from typing import Any

import torch
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
