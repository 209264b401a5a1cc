"""The examples run as they stand, in seconds, and what they print is so."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

RUNS = {
    "finetune_transformer.py": (["--steps", "3"], "transformers"),
    "train_resnet.py": (["--epochs", "1"], "sklearn"),
    "run_unet.py": (["--steps", "2"], "diffusers"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, library = RUNS[name]
    pytest.importorskip(library)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    assert re.search(r"\w+: [\d.]+ ms before, [\d.]+ ms after$", text.strip())
    assert all(int(swapped) > 0 for swapped in re.findall(r"(\d+) of \d+ sites swapped", text))
    if losses := re.search(r"loss ([\d.]+) before, ([\d.]+) after", text):
        assert float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-3)
    if difference := re.search(r"between the images: (\S+)", text):
        assert float(difference[1]) < 1e-3


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RUNS}
