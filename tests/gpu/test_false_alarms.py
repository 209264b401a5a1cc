"""Right kernels are never put back: 200 random models in three dtypes, train and eval."""

from __future__ import annotations

import pytest
import torch
from random_models import false_alarms

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_no_site_is_put_back(dtype: torch.dtype, training: bool) -> None:
    alarms, sites = [], 0
    for seed in range(200):
        found, count = false_alarms(seed, "cuda", dtype, training)
        alarms += [(seed, row["name"], row["kind"], row["detail"]) for row in found]
        sites += count
    assert alarms == [] and sites > 400
