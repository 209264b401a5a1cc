"""Right kernels are never put back: 200 random models in three dtypes, train and eval."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_models import false_alarms

MODELS = 200
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_no_site_is_put_back(
    dtype: torch.dtype, training: bool, record_property: Callable[[str, object], None]
) -> None:
    alarms, sites = [], 0
    for seed in range(MODELS):
        found, count = false_alarms(seed, "cuda", dtype, training)
        alarms += [(seed, row["name"], row["kind"], row["detail"]) for row in found]
        sites += count
    for name, value in (("models", MODELS), ("sites", sites), ("alarms", len(alarms))):
        record_property(name, value)
    assert alarms == [] and sites > 400
