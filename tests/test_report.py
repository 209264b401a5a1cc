"""The report: a table a person can read, the same as data."""

from __future__ import annotations

import json

import torch
from models import Every, randomised
from torch import nn

import normswap


def test_table_rows_and_json() -> None:
    model = randomised(Every()).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(4, 6, 5), exclude="rms"))
    text = str(report)
    assert text.startswith("normswap: 4 swapped on cpu, float32, eval mode")
    assert "left alone: rms: left out by include/exclude; cure: change the filters" in text
    assert "wiring only" in text and "normswap.revert(model)" in text
    assert max(len(line) for line in text.splitlines()[1:8]) <= 110
    data = json.loads(report.to_json())
    assert [row["name"] for row in data["rows"]] == [row["name"] for row in report.rows]
    assert data["model"]["passed"]


def test_a_hundred_sites_stay_readable() -> None:
    class Odd(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(*(Odd(4) if i % 2 else nn.LayerNorm(4) for i in range(100)))
    text = str(normswap.report(normswap.optimize(model, torch.randn(2, 4))))
    assert "and 45 more" in text
    assert len(text.splitlines()) < 15
