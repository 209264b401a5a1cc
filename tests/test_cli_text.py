"""What the command says, to the letter: its help, and its errors with their exit codes.

The texts lie in tests/golden; NORMSWAP_WRITE_GOLDEN=1 writes them anew, for a look at what changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import REPOSITORY, ZOO, forget_zoo, randomized, write_payload, write_shards
from click.testing import CliRunner
from malformed import MALFORMED
from torch import nn

from normswap.checkpoint import build_model
from normswap.cli import main

GOLDEN = REPOSITORY / "tests" / "golden"

HELP = ["", "inspect", "convert", "verify", "bench", "build", "env"]

ERRORS = """
inspect none.pt
inspect empty
inspect two
inspect cut.pt
inspect evil.pt
inspect whole.pt
inspect page.bin
inspect model.onnx
inspect program.pt2
inspect script.pt
inspect nested.pt
inspect nested.pt --key optimizer
inspect net.pt --strip-prefix model.
inspect net.pt --model zoo.net
inspect net.pt --model zoo:missing
inspect net.pt --model zoo:text
inspect net.pt --model zoo:raises
inspect net.pt --model zoo:number
inspect net.pt --model zoo:tied
inspect wrapped.pt --model zoo:net
inspect net.pt --model nowhere:net
inspect net.pt --model timm:../x
inspect net.pt --model hf:empty
inspect net.pt --include re:(
inspect shards
convert
convert net.pt
convert net.pt out
convert net.pt out --in-place
convert net.pt out --bogus
convert net.pt net.pt --model zoo:net
convert net.pt out.onnx --model zoo:net
convert sound sound/out --model zoo:net
convert net.pt out --model zoo:net --device tpu9
convert net.pt out --model zoo:net --dtype int8
convert net.pt out --model zoo:net --kwargs {
convert net.pt out --model zoo:net --kwargs []
convert net.pt out --model zoo:net --input float32
convert net.pt out --model zoo:net --input int64[2]
convert net.pt out --model zoo:net --input float32[2,5] --device cpu
convert net.pt out --model zoo:net --input float33[2]
convert net.pt out --model zoo:net --on-empty loud
convert plain.pt out --model zoo:plain --on-empty raise --device cpu
convert plain.pt out.pt --model zoo:plain --fold --input float32[2,3] --device cpu
convert net.pt --in-place --model zoo:net --fold
convert net.pt out --model zoo:net --fold --device cpu
convert net.pt out --model zoo:net --export net.onnx --validate off --device cpu
convert nested.pt out.safetensors --key model --model zoo:net
verify net.pt
verify net.pt none.pt
verify net.pt plain.pt
verify converted
verify flipped
bench net.pt --model zoo:net
build --arch hopper
prove
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with what the commands of ERRORS name."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    forget_zoo()
    state = randomized(build_model("zoo:net")).state_dict()
    torch.save(state, "net.pt")
    torch.save(build_model("zoo:plain").state_dict(), "plain.pt")
    torch.save({"model": state, "ema": dict(state), "epoch": 3}, "nested.pt")
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "wrapped.pt")
    torch.save(nn.Sequential(nn.LayerNorm(3)), "whole.pt")
    Path("cut.pt").write_bytes(Path("net.pt").read_bytes()[:700])
    write_payload(Path("evil.pt"), tmp_path / "executed")
    Path("page.bin").write_text("<!DOCTYPE html>")
    Path("program.pt2").touch()
    Path("model.onnx").touch()
    MALFORMED["TorchScript"][2](Path("script.pt"))
    Path("empty").mkdir()
    Path("two").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save(state, f"two/{name}")
    write_shards(tmp_path / "shards", state, ".safetensors", 2)
    shutil.copytree("shards", "sound")
    Path("shards/model-00002-of-00002.safetensors").unlink()
    assert CliRunner().invoke(main, shlex.split(CONVERT)).exit_code == 0
    shutil.copytree("converted", "flipped")
    content = bytearray(Path("flipped/net.pt").read_bytes())
    content[content.index(state["norm.weight"].numpy().tobytes())] ^= 1
    Path("flipped/net.pt").write_bytes(content)
    yield tmp_path
    forget_zoo()


CONVERT = "convert net.pt converted --model zoo:net --device cpu --validate off"


def golden(name: str, text: str) -> None:
    if os.environ.get("NORMSWAP_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


@pytest.mark.parametrize("command", HELP)
def test_help(command: str) -> None:
    result = CliRunner().invoke(main, [*command.split(), "--help"], prog_name="normswap", terminal_width=100)
    assert (result.exit_code, result.stderr) == (0, "")
    golden(f"help{command and '_'}{command}.txt", result.stdout)


def test_errors(folder: Path) -> None:
    transcript = []
    for line in ERRORS.strip().splitlines():
        result = CliRunner().invoke(main, shlex.split(line), prog_name="normswap")
        told = result.stderr.replace(str(folder), "FOLDER").replace("addmm: mat1", "mat1")  # as PyTorch 2.15 says it
        transcript.append(f"$ normswap {line}\n{result.stdout}{told}[{result.exit_code}]\n")
        assert result.exit_code > 0 or line.startswith("verify"), line
    golden("errors.txt", "\n".join(transcript))
