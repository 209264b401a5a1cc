"""The rows of docs/tools.md that are marked GPU, where our kernels run."""

from __future__ import annotations

import pytest
import tool_rows
import torch
from tool_table import Row, model_on, optimized, params, x_on
from torch.profiler import ProfilerActivity, profile

from normswap import native

assert tool_rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", params("cuda"))
def test_tool(row: Row) -> None:
    assert row.check("cuda") == row.declared
    torch.cuda.synchronize()


def test_the_model_of_the_table_runs_our_kernels() -> None:
    assert native.status().available
    x = x_on("cuda")
    fast = optimized(model_on("cuda", 1), x)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        fast(x)
        torch.cuda.synchronize()
    ours = [event.key for event in profiled.key_averages() if "normswap" in event.key]
    assert len(ours) >= 3, [event.key for event in profiled.key_averages()]
