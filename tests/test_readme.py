"""README's figures are those of the committed record."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_the_record_s() -> None:
    record = json.loads((ROOT / "tests" / "gpu_record.json").read_text())
    text = (ROOT / "README.md").read_text()
    for row in record["benchmark"]["rows"]:
        name = f"| {row['workload']} {'x'.join(map(str, row['shape']))} {row['mode']} |"
        line = next(line for line in text.splitlines() if line.startswith(name))
        for key in ("floor_ms", "eager_ms", "torch.compile_ms", "normswap_ms"):
            assert f"| {row[key]:.3f} |" in line, (name, key)
    for row in record["models"]:
        assert f"| {row['model']} | {row['dtype']} | {row['swapped']} | {row['eager_ms']:.2f} | " in text
    assert record["device"] in text and record["torch"] in text and record["date"] in text
