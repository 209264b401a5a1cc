"""Right kernels are never put back: random models, dtypes and modes. tests/gpu has the full number, on our kernels."""

from __future__ import annotations

import warnings

import pytest
import torch
from random_models import false_alarms
from torch import nn

import normswap

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


def test_a_limit_beyond_what_float16_holds_is_one() -> None:
    """Columns without a spread, whose variance float32 knows to within more than there is: the SiLU's slope at what its
    input might be is asked for no farther than float16 goes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, eps=1e-6), nn.SiLU())
    nn.init.normal_(model[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model.half(), torch.full((5, 64), 1000.0).half(), validate="grad")
    (row, *_) = normswap.report(swapped).rows
    assert row["kind"] == "region" and row["gradients"] and row["eager_error_share"] < 1.0 and not row["detail"]
