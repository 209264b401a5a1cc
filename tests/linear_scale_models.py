"""Linear -> scale -> BatchNorm, for the tests of its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rule_checks import expression, randomise
from torch import Tensor, nn

from normswap import rules
from normswap.plans import Match, Reason, Refusal
from normswap.regions.spec import Region

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


def found_in(module: nn.Module) -> tuple[Match, str]:
    """The match of a module with one region, and what that is."""
    match = rules.find(module)
    assert isinstance(match, Match) and match.kind == "region", match
    (data,) = match.attributes["regions"]
    return match, Region.from_json(data).name


def assert_left(module: nn.Module, reason: Reason, word: str = "") -> None:
    """Nothing of ``module`` is swapped, and the report says why."""
    answer = rules.find(module)
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == (LSB, reason), answer
    assert word in answer.detail, answer
