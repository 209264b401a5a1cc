"""Files with random damage: read as they were meant, or refused in one line; nothing else is ever raised.

The environment's NORMSWAP_FUZZ_SECONDS says for how long it tries, 6 seconds without it (pass --timeout 0 with more).
"""

from __future__ import annotations

import io
import os
import struct
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import snapshot, write_shards
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from malformed import archive
from torch import nn

from normswap.checkpoint import CheckpointError, convert, load_model, open_checkpoint, same_tensors, verify
from normswap.cli.summary import summarize
from normswap.plans import NormswapError

SECONDS = float(os.environ.get("NORMSWAP_FUZZ_SECONDS", "6"))
EDGES = [0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    b"0",
    b"-1",
    b"9" * 30,
    b"null",
    b"NaN",
    b"[]",
    b"{}",
    b'""',
    b"../",
    b"\\u0000",
    b"\\ud800",
    b"[" * 3000,
    b"1e999",
]

Damage = tuple[str, float, Any]

WHERE = st.floats(0, 1)
DAMAGES = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), WHERE, st.integers(0, 7)),
        st.tuples(st.just("byte"), WHERE, st.integers(0, 255)),
        st.tuples(st.just("cut"), WHERE, st.integers(1, 64)),
        st.tuples(st.just("end"), WHERE, st.none()),
        st.tuples(st.just("insert"), WHERE, st.one_of(st.binary(min_size=1, max_size=16), st.sampled_from(TEXTS))),
        st.tuples(st.just("number"), WHERE, st.tuples(st.sampled_from(EDGES), st.sampled_from(["<I", "<Q", ">Q"]))),
        st.tuples(st.just("copy"), WHERE, st.tuples(WHERE, st.integers(1, 200))),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, damages: Sequence[Damage]) -> bytes:
    found = bytearray(content)
    for kind, where, what in damages:
        at = min(int(where * len(found)), max(len(found) - 1, 0))
        if kind == "flip" and found:
            found[at] ^= 1 << what
        elif kind == "byte" and found:
            found[at] = what
        elif kind == "cut":
            del found[at : at + what]
        elif kind == "end":
            del found[at:]
        elif kind == "insert":
            found[at:at] = what
        elif kind == "number":
            number = struct.pack(what[1], what[0] % 2 ** (8 * struct.calcsize(what[1])))
            found[at : at + len(number)] = number
        elif kind == "copy":
            start = int(what[0] * len(found))
            found[at:at] = found[start : start + what[1]]
    return bytes(found)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))


def state() -> dict[str, Any]:
    found = model().state_dict()
    found["half"] = torch.randn(3, 2).to(torch.bfloat16)
    found["tied"] = found["0.weight"]
    return dict(found)


def saved(value: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content, **options)
    return content.getvalue()


def as_file(name: str) -> Callable[[Path, bytes], Path]:
    def write(folder: Path, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def in_archive(folder: Path, content: bytes) -> Path:
    """``content`` as the data.pkl of an archive with right checksums, so that the damage gets further."""
    with zipfile.ZipFile(io.BytesIO(saved(state()))) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist() if "/data/" in name}
    archive(folder / "file.pt", content, members)
    return folder / "file.pt"


def as_header(folder: Path, content: bytes) -> Path:
    """``content`` as the header of a safetensors file, its length right."""
    (folder / "file.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(256))
    return folder / "file.safetensors"


def as_index(folder: Path, content: bytes) -> Path:
    (folder / "folder/model.safetensors.index.json").write_bytes(content)
    return folder / "folder"


def seeds(folder: Path) -> dict[str, tuple[bytes, Callable[[Path, bytes], Path]]]:
    """By name: sound content, and what puts damaged content where it is read from."""
    archived = saved(state())
    with zipfile.ZipFile(io.BytesIO(archived)) as file:
        (pickled,) = (file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    plain = {name: tensor.clone() for name, tensor in state().items()}
    stored = safetensors.torch.save(plain, {"format": "pt"})
    header = stored[8 : 8 + struct.unpack("<Q", stored[:8])[0]]
    write_shards(folder / "folder", plain, ".safetensors", 2)
    index = (folder / "folder/model.safetensors.index.json").read_bytes()
    nested = saved(
        {"epoch": 3, "state_dict": state(), "optimizer": {"state": {0: {"step": torch.ones(1)}}, "lr": [0.1]}}
    )
    return {
        "archive": (archived, as_file("file.pt")),
        "nested": (nested, as_file("file.ckpt")),
        "pickle": (pickled, in_archive),
        "legacy": (saved(state(), _use_new_zipfile_serialization=False), as_file("file.bin")),
        "safetensors": (stored, as_file("file.safetensors")),
        "header": (header, as_header),
        "index": (index, as_index),
    }


def read(path: Path) -> None:
    try:
        found = open_checkpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(path.parent) in str(error)
    else:
        assert found.state and same_tensors(found.state, found.state)
        str(summarize(found.tensors))


LEAST = 21
"""On a machine that others use too."""


def tried(seconds: float, check: Callable[..., None], **strategies: Any) -> int:
    """Run ``check`` on drawn arguments for so long and LEAST times, each round from another seed; returns how often."""
    count, rounds, stop = 0, 0, time.monotonic() + seconds

    def counted(**drawn: Any) -> None:
        nonlocal count
        if count < LEAST or time.monotonic() < stop:
            count += 1
            check(**drawn)

    while count < LEAST or time.monotonic() < stop:
        rounds += 1
        run = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))(
            given(**strategies)(counted)
        )
        seed(rounds)(run)()
    return count


@pytest.mark.case("malformed-files")
@pytest.mark.filterwarnings("ignore")
def test_damaged_files(tmp_path: Path) -> None:
    sound = seeds(tmp_path)
    for content, write in sound.values():
        if write is not as_header:
            read(write(tmp_path, content))

    def check(kind: str, damages: list[Damage]) -> None:
        content, write = sound[kind]
        read(write(tmp_path, damaged(content, damages)))

    count = tried(SECONDS * 2 / 3, check, kind=st.sampled_from(sorted(sound)), damages=DAMAGES)
    print(f"{count} damaged files")
    assert count > 20


@pytest.mark.case("malformed-files")
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_conversion(tmp_path: Path) -> None:
    """No damage to any file of it, the manifest among them, makes load_model answer with other tensors."""
    (tmp_path / "in").mkdir()
    torch.save(nn.LayerNorm(8).state_dict(), tmp_path / "in/weights.pt")
    out = tmp_path / "out"
    kwargs = {"normalized_shape": 8}
    convert(tmp_path / "in", out, "torch.nn:LayerNorm", factory_kwargs=kwargs, device="cpu", validate="off")
    sound = snapshot(out)

    def check(name: str, damages: list[Damage]) -> None:
        (out / name).write_bytes(damaged(sound[name], damages))
        try:
            loaded = load_model(out, model=nn.LayerNorm(8))
        except NormswapError as error:
            assert "\n" not in str(error)
        else:
            assert torch.equal(loaded.weight, torch.ones(8)) and torch.equal(loaded.bias, torch.zeros(8))
        try:
            verify(out)
        except NormswapError as error:
            assert "\n" not in str(error)
        (out / name).write_bytes(sound[name])

    count = tried(SECONDS / 3, check, name=st.sampled_from(sorted(sound)), damages=DAMAGES)
    print(f"{count} damaged conversions")
    assert count > 20
