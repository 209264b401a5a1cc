"""What is wrong with a file is said in one line; nothing in it is run, and little memory or time is spent on it."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from checkpoints import snapshot
from click.testing import CliRunner
from malformed import MALFORMED, archive, pickled, sound

from normswap.checkpoint import CheckpointError, convert, load_model, open_checkpoint, verify
from normswap.cli import main

FACTORY = "torch.nn:Module"


def test_there_are_many() -> None:
    assert len(MALFORMED) >= 90


def test_a_sound_file_made_the_same_way_is_read(tmp_path: Path) -> None:
    archive(tmp_path / "file.pt", pickled(sound()))
    assert open_checkpoint(tmp_path / "file.pt").state["weight"].tolist() == [0.0] * 4


@pytest.mark.case("malformed-files")
@pytest.mark.parametrize("name", MALFORMED)
def test_read(tmp_path: Path, name: str) -> None:
    file, message, write = MALFORMED[name]
    write(tmp_path / file)
    started = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(tmp_path / file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(raised.value).startswith(str(tmp_path)) and "\n" not in str(raised.value)
    assert not (tmp_path / "executed").exists()
    assert peak < 100e6 and time.perf_counter() - started < 20


@pytest.mark.case("malformed-files")
@pytest.mark.parametrize("name", MALFORMED)
def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, _, write = MALFORMED[name]
    write(tmp_path / file)
    before = {} if "pipe" in name else snapshot(tmp_path)
    for command in (["inspect", file], ["verify", file], ["convert", file, "out.pt", "--model", FACTORY]):
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert result.stderr.startswith(f"normswap: {file}") and result.stderr.count("\n") == 1
    assert before == ({} if "pipe" in name else snapshot(tmp_path))


@pytest.mark.case("malformed-files")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_flipped_bit_anywhere_is_caught(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in").mkdir()
    torch.save(torch.nn.LayerNorm(64).state_dict(), tmp_path / "in/a.pt")
    out = tmp_path / f"out/a{suffix}"
    kwargs = {"normalized_shape": 64}
    convert(tmp_path / "in/a.pt", out, "torch.nn:LayerNorm", factory_kwargs=kwargs, device="cpu", validate="off")
    whole = out.read_bytes()
    for at in range(0, len(whole), len(whole) // 40):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        out.write_bytes(changed)
        for opening in (lambda: load_model(out, model=torch.nn.LayerNorm(64)), lambda: verify(out)):
            with pytest.raises(CheckpointError, match=r"out/a\."):
                opening()
    out.write_bytes(whole)
    assert verify(out).same and load_model(out, model=torch.nn.LayerNorm(64))
