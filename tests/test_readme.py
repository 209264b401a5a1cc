"""README's figures are those of the committed record."""

from __future__ import annotations

import json
from pathlib import Path

import benchmark

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_the_record_s() -> None:
    record = json.loads((ROOT / "tests" / "gpu_record.json").read_text())
    text = (ROOT / "README.md").read_text()
    for row in record["benchmark"]["rows"]:
        assert f"| {' | '.join(benchmark.cells(row))} |" in text
    for row in record["benchmark"]["host"]:
        assert f"| {row['module']} | {row['eager_us']:.1f} | {row['normswap_us']:.1f} |" in text
    for row in record["models"]:
        assert f"| {row['model']} | {row['dtype']} | {row['swapped']} | {row['eager_ms']:.2f} | " in text
    assert record["device"] in text and record["torch"] in text and record["date"] in text
