"""Every kernel at sizes small enough for compute-sanitizer, which scripts/gpu_check runs over this file."""

from __future__ import annotations

import pytest
import torch
from accuracy import REGIMES, SHORT_LENGTHS, Setting, settings, shares
from torch import Tensor, nn

import normswap
from normswap.compare import compare


class ChannelWeightedRMSNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight


DTYPES = (torch.float32, torch.bfloat16)


def test_every_regime_and_path() -> None:
    seen = set()
    for setting in settings(SHORT_LENGTHS, DTYPES, (1.0,)):
        ours, _ = shares(setting)
        assert ours <= 1.0, setting
        seen.add((setting.kind, setting.regime))
    rows = {(kind, regime) for kind in ("layer_norm", "rms_norm", "l1_norm", "group_norm") for regime in REGIMES}
    assert rows <= seen and len(seen) == len(rows) + 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype: torch.dtype) -> None:
    """The forward that saves statistics, and the backward kernels."""
    found = settings({"subwarp": (64,), "warp": (769,), "block": (2050,)}, (dtype,), (1.0,))
    weighted = Setting("rms_norm", "over channels", lambda: ChannelWeightedRMSNorm(130), (3, 130, 77), dtype, 1.0)
    for setting in [*found, *([weighted] if dtype is torch.float32 else [])]:  # in 16 bits it runs as it is
        module, x = setting.module(), setting.input()
        (swap,) = normswap.plan(module).swaps
        comparison = compare(swap.match, module, x, True)
        assert comparison.kernel_ran and comparison.gradients and not comparison.problem, (setting, comparison)
