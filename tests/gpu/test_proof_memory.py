"""The proof of large sites on the GPU: proved, and less than 512 MB held beyond the twin's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import compared
from models import L1, Projection, randomised
from torch import nn

import normswap

LARGE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(4096), (32768, 4096)),
    "rms_norm": (lambda: nn.RMSNorm(4096), (32768, 4096)),
    "group_norm": (lambda: nn.GroupNorm(8, 64), (8, 64, 512, 512)),
    "batch_norm": (lambda: nn.BatchNorm1d(512), (262144, 512)),
    "l1_norm": (L1, (2048, 65535)),
    "linear_scale_batch_norm": (lambda: Projection(512, 512), (262144, 512)),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("kind", LARGE)
def test_held_at_most(kind: str, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    make, shape = LARGE[kind]
    module, x = randomised(make()).to("cuda", dtype).train(), torch.randn(shape, device="cuda", dtype=dtype)
    swap, *_ = normswap.plan(module).swaps
    compared(swap.match, module, x[:4], True)  # libraries take their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = compared(swap.match, module, x, True)
    held = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        output = module(x).nbytes
    record_property("beyond_output_MB", round((held - output) / 1e6, 1))
    assert not found.problem and found.kernel_ran and found.gradients and found.coverage < 1, found
    assert held <= output + 512e6, f"{held / 1e6:.0f} MB beside an output of {output / 1e6:.0f} MB"
