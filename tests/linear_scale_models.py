"""Linear -> scale -> BatchNorm, for the tests of its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rule_checks import expression, randomise
from torch import Tensor, nn

LSB = "linear_scale_batch_norm"
FEATURES, CHANNELS = 6, 5


def block(forward: Callable[..., Any], scale: Any = (CHANNELS,), linear_bias: bool = True, **bn: Any) -> nn.Module:
    module = expression(forward)
    module.gemm = nn.Linear(FEATURES, CHANNELS, bias=linear_bias)
    module.bn = nn.BatchNorm1d(CHANNELS, **bn)
    if isinstance(scale, tuple):
        module.scale = nn.Parameter(torch.empty(scale))
    elif isinstance(scale, Tensor):
        module.register_buffer("scale", scale)
    else:
        module.scale = scale
    return randomise(module)


def one_line(self, x):
    return self.bn(self.gemm(x) * self.scale)
