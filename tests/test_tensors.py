from __future__ import annotations

import argparse
import copy
import json
import os
import stat
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import awkward_tensors, read_tensors, snapshot, write_payload, write_tensors
from torch import Tensor, nn

from normswap.checkpoint import CheckpointError, files, same_tensors
from normswap.checkpoint.files import copy_file, replacing, settle

SUFFIXES = (".pt", ".pth", ".safetensors")


@pytest.mark.parametrize("second", SUFFIXES)
@pytest.mark.parametrize("first", SUFFIXES)
def test_round_trips_keep_bits_order_ties_and_metadata(tmp_path: Path, first: str, second: str) -> None:
    tensors = awkward_tensors()
    tensors._metadata = OrderedDict([("", {"version": 1}), ("bn", {"version": 2})])
    write_tensors(tmp_path / f"a{first}", tensors, {"author": "someone", "format": "pt"})
    once, metadata = read_tensors(tmp_path / f"a{first}")
    write_tensors(tmp_path / f"b{second}", once, metadata)
    twice, metadata = read_tensors(str(tmp_path / f"b{second}"))
    assert same_tensors(tensors, once) and same_tensors(tensors, twice)
    assert metadata == {"author": "someone", "format": "pt"}
    assert twice._metadata == tensors._metadata
    assert twice["z.embedding"].data_ptr() == twice["a.head"].data_ptr()
    assert twice["empty"].shape == (0, 3)


def test_same_tensors_sees_what_is_no_tensor() -> None:
    values = [float("nan"), -0.0, 0.0, 1, True, None, "a", 1 + 2j, np.float64("nan"), np.arange(2), np.arange(2.0)]
    values += [np.array([None, [1.0]], dtype=object), np.array([None, [2.0]], dtype=object), {"a": torch.ones(2)}]
    values += [{"a": torch.ones(1)}, {"b": torch.ones(2)}, [torch.ones(2)], (torch.ones(2),), [], [torch.ones(2)] * 2]
    values += [argparse.Namespace(a=torch.ones(2)), argparse.Namespace(a=np.ones(2)), torch.ones(2)]
    for at, one in enumerate(values):
        same = [i for i, other in enumerate(values) if same_tensors({"": one}, {"": copy.deepcopy(other)})]
        assert same == [at], one


def test_same_tensors_of_sparse_ones_takes_no_memory_of_dense_ones() -> None:
    one, same, other = (torch.sparse_coo_tensor([[1], [at]], [float("nan")], (2**40, 2**20)) for at in (2, 2, 3))
    assert same_tensors({"": one}, {"": same}) and not same_tensors({"": one}, {"": other})


def test_same_tensors_sees_every_difference() -> None:
    tensors = awkward_tensors()
    assert same_tensors(tensors, awkward_tensors())
    assert not same_tensors(tensors, dict(reversed(tensors.items())))
    for name, tensor in tensors.items():
        changed: list[Tensor] = [tensor.unsqueeze(0)]
        if tensor.numel():
            bits = tensor.contiguous().clone()
            bits.view(-1).view(torch.uint8)[0] ^= 1
            changed.append(bits)
        if tensor.dtype.itemsize == 4:
            changed.append(tensor.contiguous().view(torch.int32))
        for other in changed:
            assert not same_tensors(tensors, {**tensors, name: other}), name
    for other in (tensors["transposed"].to_sparse(), tensors["transposed"].to_sparse_csr()):
        assert same_tensors({"": other}, {"": other.clone()}) and not same_tensors({"": other}, {"": other * 2})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_same_tensors_sees_every_bit(dtype: torch.dtype) -> None:
    bits = torch.zeros(3 * dtype.itemsize + 16, dtype=torch.uint8)[16:]  # begins inside its storage
    first = bits.clone().view(dtype)
    for at in range(len(bits)):
        bits[at] = 0x80
        assert not same_tensors({"a": bits.view(dtype)}, {"a": first}), at
        bits[at] = 0
    assert same_tensors({"a": bits.view(dtype)}, {"a": first})


def test_the_format_in_the_metadata_ties_nothing(tmp_path: Path) -> None:
    safetensors.torch.save_file({"pt": torch.ones(2)}, tmp_path / "t.safetensors", metadata={"format": "pt"})
    tensors, metadata = read_tensors(tmp_path / "t.safetensors")
    assert list(tensors) == ["pt"] and metadata == {"format": "pt"}
    tensors["format"] = tensors["pt"]
    for text in (metadata, {}):
        write_tensors(tmp_path / "u.safetensors", tensors, text)
        again, kept = read_tensors(tmp_path / "u.safetensors")
        assert same_tensors(tensors, again) and kept == text


@pytest.mark.case("tied-in-safetensors")
def test_files_of_safetensors_own_save_model_keep_their_ties(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "tied.safetensors"))
    tensors, metadata = read_tensors(tmp_path / "tied.safetensors")
    assert set(tensors) == {"0.weight", "1.weight"} and metadata == {}
    assert torch.equal(tensors["0.weight"], model[0].weight)
    assert tensors["0.weight"].data_ptr() == tensors["1.weight"].data_ptr()


@pytest.mark.case("tied-in-safetensors")
def test_a_tie_is_stored_once(tmp_path: Path) -> None:
    table = torch.randn(1000, 100)
    for suffix in SUFFIXES:
        write_tensors(tmp_path / f"t{suffix}", {"one": table, "two": table})
        assert table.nbytes < (tmp_path / f"t{suffix}").stat().st_size < 1.1 * table.nbytes


def test_a_tied_name_that_the_metadata_uses_is_stored_in_full(tmp_path: Path) -> None:
    table = torch.randn(3)
    write_tensors(tmp_path / "t.safetensors", {"a": table, "b": table}, {"b": "words of the author"})
    tensors, metadata = read_tensors(tmp_path / "t.safetensors")
    assert same_tensors(tensors, {"a": table, "b": table}) and metadata == {"b": "words of the author"}


def test_a_view_does_not_bring_its_storage_along(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        write_tensors(tmp_path / f"v{suffix}", {"row": torch.randn(1000, 1000)[0]})
        assert (tmp_path / f"v{suffix}").stat().st_size < 8000


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(path: Path, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as raised:
        read_tensors(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    return str(raised.value)


def test_missing_files_folders_and_other_suffixes(tmp_path: Path) -> None:
    refused(tmp_path / "none.pt", "no such file")
    (tmp_path / "folder.safetensors").mkdir()
    refused(tmp_path / "folder.safetensors", "a folder without a checkpoint")
    for name in ("model.onnx", "model", ".pt"):
        (tmp_path / name).write_bytes(b"x")
        refused(tmp_path / name, "is not one of .pt, .pth, .bin, .ckpt, .safetensors")
        with pytest.raises(CheckpointError, match="is not one of"):
            write_tensors(tmp_path / name, {"a": torch.ones(1)})
        assert (tmp_path / name).read_bytes() == b"x"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_anywhere(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"whole{suffix}"
    write_tensors(path, {"weight": torch.randn(300), "bias": torch.randn(5)})
    whole = path.read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in sorted({0, 1, 7, 8, 9, 60, len(whole) - 1, *range(100, len(whole), 131)}):
        cut.write_bytes(whole[:length])
        refused(cut, "truncated, or not a")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_bytes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"foreign{suffix}"
    for content in (
        b"hello world" * 20,
        b"\x00" * 64,
        b"\xff" * 64,
        b"PK\x03\x04" + b"x" * 100,
        b"\x80\x02}q\x00.",
        b"{}",
    ):
        path.write_bytes(content)
        refused(path, "truncated, or not a|not a state_dict")


@pytest.mark.parametrize("plain", [True, False])
def test_what_a_pickle_asks_for_is_named_and_not_run(tmp_path: Path, plain: bool) -> None:
    marker = tmp_path / "executed"
    write_payload(tmp_path / "evil.pt", marker, plain=plain)
    refused(
        tmp_path / "evil.pt",
        r"refused, it asks to run more than tensors need: (posix|os)\.system; save model.state_dict",
    )
    assert not marker.exists()


def test_a_whole_pickled_model_is_refused_with_its_classes(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), tmp_path / "model.pt")
    message = refused(tmp_path / "model.pt", "it asks to run more than tensors need")
    for name in ("linear.Linear", "activation.ReLU", "container.Sequential"):
        assert name in message


def test_torchscript_and_compressed_archives(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    refused(tmp_path / "script.pt", "TorchScript archive or torch.export program; optimize before exporting")
    torch.save({"a": torch.zeros(9999)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    refused(tmp_path / "small.pt", "zip members are compressed")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "not a state_dict .* but dict of 0"),
        ({"epoch": 3, "history": {"loss": 0.1}}, "but dict of 2"),
        ([torch.ones(1)], "but list"),
        (torch.ones(2, 3), r"but tensor \[2, 3\]"),
        ({1: torch.ones(1)}, "but dict of 1"),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", message)


def test_files_older_than_the_zip_format_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3), "a": torch.randn(2)}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same_tensors(read_tensors(tmp_path / "old.pt")[0], tensors)


@pytest.mark.parametrize("record", ['["a"]', '["a", "a"]', '{"a": 1}', "3", "[", '["a", "c"]'])
def test_a_wrong_record_of_the_order(tmp_path: Path, record: str) -> None:
    tensors = {"a": torch.ones(1), "b": torch.ones(1)}
    safetensors.torch.save_file(tensors, tmp_path / "t.safetensors", metadata={"normswap.order": record})
    refused(tmp_path / "t.safetensors", "normswap.order|order recorded")


def test_what_a_format_cannot_hold(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    complexes = (torch.ones(2, dtype=dtype) for dtype in (torch.complex32, torch.complex128))
    for bad in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), quantized, *complexes):
        kind = bad.dtype if bad.layout is torch.strided else bad.layout
        with pytest.raises(CheckpointError, match=rf"cannot hold bad \({kind}\); name a file that ends in .pt"):
            write_tensors(tmp_path / "t.safetensors", {"bad": bad})
    tensors: OrderedDict[str, Tensor] = OrderedDict(a=torch.ones(1))
    tensors._metadata = {"": {"version": (1, 2)}}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="module metadata is not JSON"):
        write_tensors(tmp_path / "t.safetensors", tensors)
    assert snapshot(tmp_path) == {}


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.case("save-over-source")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writing_over_the_file_being_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    tensors = {"a": torch.randn(50_000), "b": torch.randn(3)}
    write_tensors(path, tensors)
    mapped, _ = read_tensors(path)
    write_tensors(path, {"b": mapped["b"], "a": mapped["a"]})
    assert same_tensors(mapped, tensors)
    assert same_tensors(read_tensors(path)[0], dict(reversed(tensors.items())))
    assert set(snapshot(tmp_path)) == {path.name}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_mode_is_the_umasks_and_links_are_followed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / f"link{suffix}"
    link.symlink_to(f"real/file{suffix}")
    old = os.umask(0o027)
    try:
        write_tensors(link, {"a": torch.ones(1)})
    finally:
        os.umask(old)
    assert link.is_symlink() and stat.S_IMODE((tmp_path / f"real/file{suffix}").stat().st_mode) == 0o640


def test_several_files_are_replaced_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("old")
    before = snapshot(tmp_path)
    real, seen = os.replace, []

    def nth_fails(source: Any, target: Any) -> None:
        seen.append(target)
        if len(seen) == refused:
            raise OSError("planted")
        real(source, target)

    def write_two(first: str) -> None:
        with replacing(force=True) as block:
            block.write(tmp_path / first, lambda path: path.write_text("new"))
            names = json.dumps({"token": block.token, "written": [first]})
            block.write(tmp_path / "second", lambda path: path.write_text(names))

    monkeypatch.setattr(os, "replace", nth_fails)
    refused = 1
    for first in ("old", "deep/new"):
        seen.clear()
        with pytest.raises(OSError, match="planted"):
            write_two(first)
        assert snapshot(tmp_path) == before
    refused = 2
    seen.clear()
    with pytest.warns(UserWarning, match="old: still lies in .old.*tmp"):  # what was renamed first makes it count
        write_two("old")
    assert (tmp_path / "old").read_text() == "old"
    settle(tmp_path / "second")
    assert (tmp_path / "old").read_text() == "new" and set(snapshot(tmp_path)) == {"old", "second"}
    (tmp_path / "second").unlink()
    (tmp_path / "old").write_text("old")
    monkeypatch.undo()
    for name in ("old", "new/folder/file"):
        with pytest.raises(KeyError), replacing(force=True) as block:
            block.write(tmp_path / name, lambda path: path.write_text("new"))
            raise KeyError
        assert snapshot(tmp_path) == before


def test_a_copy_shares_its_bytes_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_bytes(bytes(range(256)) * 100)
    monkeypatch.setattr(files, "CHUNK", 1000)
    counted: list[int] = []
    for name in ("two", "three"):
        (tmp_path / name).touch()
    copy_file(tmp_path / "one", tmp_path / "two", counted.append)
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert sum(counted) in (0, 25600) and len(counted) in (0, 26)  # 0 where this file system shares

    def clones(into: int, request: int, source: int) -> int:
        assert request == 0x40049409
        return os.write(into, os.pread(source, 10, 0))

    monkeypatch.setattr(files.fcntl, "ioctl", clones)
    copy_file(tmp_path / "one", tmp_path / "three", counted.append)
    assert (tmp_path / "three").read_bytes() == bytes(range(10))
