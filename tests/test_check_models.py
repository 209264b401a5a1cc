"""scripts/check_models.py, but for what needs a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import check_models
import children
import pytest
import torch
from torch import nn


def test_what_is_compiled_is_compiled_ahead_in_other_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One that cannot be is told, and timed all the same. Which variant of a kernel was the fastest beside others is
    forgotten."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    for name in ("kernel.py", "earlier.best_config"):
        (tmp_path / "ab" / name).touch()
    os.utime(tmp_path / "ab" / "earlier.best_config", (1.0, 1.0))
    events: list[str] = []

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2] == "--compile-only"
        events.append(f"compiled {command[-1]}")
        (tmp_path / "ab" / "kernel.best_config").touch()
        return subprocess.CompletedProcess(command, int(command[-1] == "bert-base"), "", "no room")

    def check(row: Any, compiling: bool) -> dict[str, Any]:
        events.append(f"timed {row.name}")
        return {"model": row.name, "compiled": compiling}

    monkeypatch.setattr(children, "run", run)
    monkeypatch.setattr(check_models, "check", check)
    names = ["bert-base", "llama step"]
    assert [row["compiled"] for row in check_models.check_all(names)] == [True, True]
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"kernel.py", "earlier.best_config"}
    assert sorted(events[:2]) == ["compiled bert-base", "compiled llama step"]
    assert events[2:] == ["timed bert-base", "timed llama step"]
    assert capsys.readouterr().out == "not compiled ahead: bert-base: no room\n"
    assert list(check_models.check_all(names, compiling=False)) and len(events) == 6


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such model: net; there are resnet50_gn, "):
        list(check_models.check_all(["net"]))


class NormRelu(nn.BatchNorm1d):
    """As in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()


class NormHead(nn.Sequential):
    """Called after the norm that it holds."""


def test_a_model_without_its_norms_keeps_their_activations_and_all_else() -> None:
    head, linear = nn.Linear(3, 2), nn.Linear(4, 3)
    model = nn.Sequential(linear, NormRelu(3), NormHead(nn.LayerNorm(3), head)).eval()
    x, before = torch.randn(5, 4), model(torch.ones(5, 4))
    assert torch.equal(check_models.without_norms(model)(x), head(linear(x).relu()))
    assert torch.equal(model(torch.ones(5, 4)), before)
