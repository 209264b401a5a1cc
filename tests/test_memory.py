"""How much memory of its own a conversion and an opening take, in copies of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoints import environment
from torch import nn

BIG = """
import torch
from torch import nn

def model():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2000, 2000), nn.LayerNorm(2000))])

def lean():
    with torch.device("meta"):
        return model()
"""

MEASURE = """
import json, re, sys, threading, time
import torch.export, torch.fx.experimental.symbolic_shapes
import normswap
from normswap.checkpoint import convert, load_model

def own():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", status.read())[1]) << 10

def watch():
    while True:
        peak[0] = max(peak[0], own())
        time.sleep(0.001)

peak = [0]
threading.Thread(target=watch, daemon=True).start()
found = {}
for what, work in (
    ("convert", lambda: convert(sys.argv[1], sys.argv[2], sys.argv[3], device="cpu", validate="off")),
    ("load", lambda: load_model(sys.argv[2], trust_factory=True)),
):
    before = peak[0] = own()
    kept = work()
    found[what] = peak[0] - before
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("factory", "copies"), [("big:model", 1), ("big:lean", 0)])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_conversion_and_an_opening_take_at_most_one_copy(
    tmp_path: Path, suffix: str, factory: str, copies: int
) -> None:
    (tmp_path / "big.py").write_text(BIG)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(2000, 2000), nn.LayerNorm(2000))])
    weights = sum(p.nbytes for p in model.parameters())
    safetensors.torch.save_file(model.state_dict(), tmp_path / "in.safetensors")
    torch.save(model.state_dict(), tmp_path / "in.pt")
    out = (
        "out.safetensors" if copies else f"out{suffix}"
    )  # a lean model has the tensors themselves where files are copied
    command = [sys.executable, "-c", MEASURE, f"in{suffix}", out, factory]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["convert"] < (copies + 0.25) * weights
    assert (copies - 0.1) * weights < found["load"] < (copies + 0.25) * weights
