"""The report: a table a person can read, the same as data."""

from __future__ import annotations

import json

import torch
from convolution_cases import in_a_row
from convolution_models import IMAGE, conv, drawn
from models import Every, randomised
from torch import nn

import normswap
from normswap.plans import Plan, Reason


def test_table_rows_and_json() -> None:
    model = randomised(Every()).eval()
    report = normswap.report(normswap.optimize(model, torch.randn(4, 6, 5), exclude="rms"))
    text = str(report)
    assert text.startswith("normswap: 4 of 5 sites swapped on cpu, float32, eval mode")
    assert "left alone: rms: left out by include/exclude; cure: change the filters" in text
    assert "unproved: 4 of 4: wiring only" in text and "normswap.revert(model)" in text
    assert max(len(line) for line in text.splitlines()[1:8]) <= 110
    data = json.loads(report.to_json())
    assert [row["name"] for row in data["rows"]] == [row["name"] for row in report.rows]
    assert data["model"]["passed"]
    assert [row["code"] for row in report.rows] == ["", "", "", "", "EXCLUDED"]
    assert Plan.from_json(json.dumps(data["plan"])) == report.plan


def test_a_hundred_sites_stay_readable() -> None:
    class Odd(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(*(Odd(4) if i % 2 else nn.LayerNorm(4) for i in range(100)))
    text = str(normswap.report(normswap.optimize(model, torch.randn(2, 4))))
    assert "and 45 more" in text
    assert len(text.splitlines()) < 15


def test_what_is_not_joined_is_told_with_its_reason() -> None:
    made = [drawn(in_a_row(conv)) for _ in range(7)]
    report = str(normswap.report(normswap.optimize(nn.Sequential(*made), torch.randn(IMAGE))))
    told = "norm apart: 0.bn, 1.bn, 2.bn, 3.bn, 4.bn and 2 more: conv.3 is called inside an nn.Sequential"
    assert told in report.splitlines()
    root = normswap.optimize(made[0], torch.randn(IMAGE))
    assert "norm apart: bn: conv.3 is called inside an nn.Sequential" in str(normswap.report(root)).splitlines()


def test_every_reason_is_a_sentence_and_a_cure() -> None:
    for reason in Reason:
        for text in (reason.sentence, reason.cure):
            assert 10 < len(text) < 120 and not text.endswith(".") and "\n" not in text


def test_what_the_proof_covers_is_told() -> None:
    model = randomised(Every()).eval()
    text = str(normswap.report(normswap.optimize(model)))
    assert "made-up inputs: 5 of 5; cure: give example_inputs that reach them" in text
    text = str(normswap.report(normswap.optimize(model, torch.randn(4, 6, 5))))
    assert "made-up" not in text and "undo: normswap.revert(model); for a block: with normswap.disabled(model)" in text
