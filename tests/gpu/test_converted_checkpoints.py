"""What transformers and timm save converts on the GPU, and a new process runs it on our kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from libraries import CASES, answer, opened_in_a_new_process
from torch import nn

import normswap
from normswap.cli import main


@pytest.mark.parametrize("name", CASES)
def test_same_outputs_in_a_new_process(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source, model = case.write(tmp_path / name)
    expected = answer(model.cuda(), case.inputs, "cuda")
    command = ["convert", str(source), str(tmp_path / "out" / name), "--input", case.inputs, "--device", "cuda"]
    command += ["--min-speedup", "0.001"]  # the models are tiny
    result = CliRunner().invoke(main, [*command, *case.options])
    assert result.exit_code == 0, result.output
    found = opened_in_a_new_process(tmp_path, "cuda", [name])[name]
    report = json.loads(found["report"])
    swapped = [row for row in report["rows"] if row["swapped"]]
    assert torch.equal(found["reverted"], expected)
    assert len(swapped) >= case.sites and (not swapped or report["model"]["passed"])
    assert not [row for row in report["rows"] if row["status"] == "failed"]
    if case.sites:  # the others' norms may go through PyTorch's own op
        assert found["kernels"] and not [row for row in swapped if row["status"] != "proved"]


@pytest.mark.parametrize("out", ["out", "out.pt", "out.dcp"])
def test_a_model_on_the_gpu_is_saved_and_opened_there(tmp_path: Path, out: str) -> None:
    x = torch.randn(64, 256, device="cuda")
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).cuda().eval()
    fast = normswap.optimize(model, x, min_speedup=None)
    normswap.save(fast, tmp_path / out)
    given = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
    opened = normswap.load_model(tmp_path / out, model=given, map_location="cuda")
    assert torch.equal(opened(x), fast(x)) and type(opened[1]) is type(fast[1])
