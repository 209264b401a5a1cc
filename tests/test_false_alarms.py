"""Right kernels are never put back: random models, dtypes and modes. tests/gpu has the full number, on our kernels."""

from __future__ import annotations

import pytest
import torch
from random_models import false_alarms

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64), ids=lambda d: str(d)[6:]
)
def test_no_site_is_put_back(dtype: torch.dtype, training: bool) -> None:
    alarms, sites = [], 0
    for seed in range(6):
        found, count = false_alarms(seed, "cpu", dtype, training)
        alarms += [(seed, row["name"], row["kind"], row["detail"]) for row in found]
        sites += count
    assert alarms == [] and sites > 15
