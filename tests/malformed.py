"""Files that are wrong, each in one way, with what is to be said about it."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from checkpoints import write_payload, write_shards
from torch import nn

MALFORMED: dict[str, tuple[str, str, Callable[[Path], object]]] = {}
"""By name: the file (or folder) to write, what the error must match, and what writes it."""

SAFETENSORS = "truncated, or not a safetensors file"
PICKLE = "truncated, or not a PyTorch checkpoint"


def malformed(name: str, file: str, message: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def add(write: Callable[[Path], object]) -> Callable[[Path], object]:
        assert name not in MALFORMED
        MALFORMED[name] = (file, message, write)
        return write

    return add


# --- safetensors ----------------------------------------------------------------------------------------------------


def raw_safetensors(header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


EIGHT = bytes(8)
HEADERS: dict[str, tuple[str, bytes]] = {
    "a header longer than the file": (SAFETENSORS, raw_safetensors({}, EIGHT, 99)),
    "a header of 2^63 bytes": (SAFETENSORS, raw_safetensors({}, EIGHT, 2**63)),
    "a header of one byte": (SAFETENSORS, raw_safetensors(b"1")),
    "a header that is no JSON": (SAFETENSORS, raw_safetensors(b"{'a': 1}", EIGHT)),
    "a header that is a list": (SAFETENSORS, raw_safetensors(b"[1, 2]", EIGHT)),
    "a header that is not UTF-8": (SAFETENSORS, raw_safetensors(b'{"\xff": 1}', EIGHT)),
    "a header nested 100,000 deep": (SAFETENSORS, raw_safetensors(b'{"a":' + b"[" * 100_000, EIGHT)),
    "a number of 10,000 digits": (SAFETENSORS, raw_safetensors(b'{"a":' + b"9" * 10_000 + b"}", EIGHT)),
    "a name there twice": (
        "'a' is there twice",
        raw_safetensors(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), EIGHT),
    ),
    "a field there twice": (
        SAFETENSORS,
        raw_safetensors(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    ),
    "a dtype nobody knows": (SAFETENSORS, raw_safetensors({"a": entry("F7")}, EIGHT)),
    "a dtype that is a list": (SAFETENSORS, raw_safetensors({"a": entry(["F32"])}, EIGHT)),
    "a negative size": (SAFETENSORS, raw_safetensors({"a": entry(shape=[-2, -1])}, EIGHT)),
    "a size that is true": (SAFETENSORS, raw_safetensors({"a": entry(shape=[2, True])}, EIGHT)),
    "a size of 2^64": (SAFETENSORS, raw_safetensors({"a": entry(shape=[2**64])}, EIGHT)),
    "sizes whose product is 2^64 + 2": (
        SAFETENSORS,
        raw_safetensors({"a": entry(shape=[2**62, 4, 2])}, EIGHT),
    ),
    "a shape that is a number": (SAFETENSORS, raw_safetensors({"a": entry(shape=2)}, EIGHT)),
    "offsets that run backwards": (SAFETENSORS, raw_safetensors({"a": entry(offsets=[8, 0])}, EIGHT)),
    "offsets that are not numbers": (
        SAFETENSORS,
        raw_safetensors(b'{"a":%s}' % b"".join([b'{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}']), EIGHT),
    ),
    "three offsets": (SAFETENSORS, raw_safetensors({"a": entry(offsets=[0, 8, 8])}, EIGHT)),
    "a tensor beyond the file": (SAFETENSORS, raw_safetensors({"a": entry(shape=[4], offsets=[0, 16])}, EIGHT)),
    "fewer bytes than the shape needs": (SAFETENSORS, raw_safetensors({"a": entry(shape=[3])}, EIGHT)),
    "bytes between tensors": (
        SAFETENSORS,
        raw_safetensors({"a": entry(), "b": entry(offsets=[16, 24])}, EIGHT * 3),
    ),
    "tensors over the same bytes": (
        SAFETENSORS,
        raw_safetensors({"a": entry(), "b": entry(offsets=[4, 12])}, EIGHT * 2),
    ),
    "bytes after the last tensor": (SAFETENSORS, raw_safetensors({"a": entry()}, EIGHT * 2)),
    "an entry without a shape": (SAFETENSORS, raw_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT)),
    "an entry that is a number": (SAFETENSORS, raw_safetensors({"a": 3}, EIGHT)),
    "metadata that is not text": (
        SAFETENSORS,
        raw_safetensors({"__metadata__": {"a": 1}, "b": entry()}, EIGHT),
    ),
    "metadata that is a list": (SAFETENSORS, raw_safetensors({"__metadata__": ["a"], "b": entry()}, EIGHT)),
    "no tensors at all": ("holds no tensors", raw_safetensors({})),
    "half a character as a name": (
        SAFETENSORS,
        raw_safetensors(b'{"\\ud800":%s}' % json.dumps(entry()).encode(), EIGHT),
    ),
}
for _name, (_message, _content) in HEADERS.items():
    malformed(_name, "file.safetensors", _message)(lambda path, content=_content: path.write_bytes(content))


# --- archives of torch.save -----------------------------------------------------------------------------------------


class Stored:
    """A storage, as torch.save describes one."""

    def __init__(self, key: str = "0", count: Any = 4, kind: Any = torch.FloatStorage) -> None:
        self.pid = ("storage", kind, key, "cpu", count)


class Rebuilt:
    """A tensor, as torch.save describes one."""

    def __init__(self, stored: Stored, size: Any = (4,), stride: Any = (1,), offset: Any = 0) -> None:
        self.arguments = (stored, offset, size, stride, False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Calls:
    """What calls ``function`` when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Stored) else None


def pickled(value: Any) -> bytes:
    content = io.BytesIO()
    _Pickler(content, protocol=2).dump(value)
    return content.getvalue()


def archive(path: Path, content: bytes, members: Mapping[str, bytes] | None = None, **options: Any) -> None:
    """A zip file with ``content`` as its data.pkl, laid out as torch.save does."""
    members = {"data/0": bytes(16)} if members is None else members
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/byteorder", "little")
        for name, data in members.items():
            file.writestr(f"archive/{name}", data)
        file.writestr("archive/version", "3\n")


def sound() -> dict[str, Any]:
    return {"weight": Rebuilt(Stored())}


PICKLES: dict[str, tuple[str, Any]] = {
    "a storage that is not there": (PICKLE, {"a": Rebuilt(Stored("1"))}),
    "a storage larger than the file holds": (
        "is none of those that the file holds",
        {"a": Rebuilt(Stored(count=1000))},
    ),
    "a storage of negative size": ("is none of those that the file holds", {"a": Rebuilt(Stored(count=-1))}),
    "a storage of 2^62 elements": ("is none of those that the file holds", {"a": Rebuilt(Stored(count=2**62))}),
    "a storage whose size is text": (PICKLE, {"a": Rebuilt(Stored(count="4"))}),
    "a storage of no known kind": (PICKLE, {"a": Rebuilt(Stored(kind=torch.Size))}),
    "a storage outside the archive": (PICKLE, {"a": Rebuilt(Stored("../../secret"))}),
    "a tensor larger than its storage": (PICKLE, {"a": Rebuilt(Stored(), (1000,))}),
    "an offset beyond the storage": (PICKLE, {"a": Rebuilt(Stored(), (4,), (1,), 10**9)}),
    "a negative stride": (PICKLE, {"a": Rebuilt(Stored(), (4,), (-1,), 3)}),
    "an expanded tensor of 4 TB": ("its elements share memory", {"a": Rebuilt(Stored(), (2**38, 4), (0, 1))}),
    "a tensor of 2^40 elements over 4": ("its elements share memory", {"a": Rebuilt(Stored(), (2**20, 2**20), (0, 0))}),
    "elements that overlap": ("its elements share memory", {"a": Rebuilt(Stored(), (2, 2), (1, 1))}),
    "tensors that overlap": (
        "a and b overlap in memory",
        (lambda one: {"a": Rebuilt(one, (3,)), "b": Rebuilt(one, (3,), (1,), 1)})(Stored()),
    ),
    "sizes that are text": (PICKLE, {"a": Rebuilt(Stored(), ("4",))}),
    "sizes and strides of two lengths": (PICKLE, {"a": Rebuilt(Stored(), (2, 2), (1,))}),
    "a call of eval": ("asks to run more than tensors need: builtins.eval|__builtin__.eval", {"a": Calls(eval, "1")}),
    "a call of exec in a nested dict": ("asks to run", {"model": {"a": Calls(exec, "1")}, "b": Rebuilt(Stored())}),
    "an import of a library": ("asks to run .*webbrowser.open", {"a": Calls(__import__("webbrowser").open, "x")}),
    "numbers alone": ("not a state_dict", {"epoch": 3, "loss": 0.5}),
    "a list": ("not a state_dict", [Rebuilt(Stored())]),
    "names that are numbers": ("not a state_dict", {0: Rebuilt(Stored())}),
}
for _name, (_message, _value) in PICKLES.items():
    malformed(_name, "file.pt", _message)(lambda path, value=_value: archive(path, pickled(value)))

OPCODES: dict[str, bytes] = {
    "an empty pickle": b"",
    "a pickle without an end": b"\x80\x02}",
    "a pickle that takes from an empty stack": b"\x80\x020.",
    "a pickle with a memo entry that is not there": b"\x80\x02h\xff.",
    "a pickle with text of 2^40 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "a pickle with bytes of 2^40 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",
    "a pickle with an extension code": b"\x80\x02\x82\x01.",
    "a pickle of a protocol to come": b"\x80\x63}.",
    "a pickle nested 20,000 deep": b"\x80\x02" + b"(" * 20_000 + b"l" * 20_000 + b".",
    "a pickle whose storage is no tuple": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "a pickle with a frame beyond its end": b"\x80\x04\x95" + struct.pack("<Q", 2**50) + b"}.",
}
for _name, _content in OPCODES.items():
    malformed(_name, "file.pt", f"{PICKLE}|not a state_dict")(lambda path, content=_content: archive(path, content))


@malformed("members that are deflated", "file.pt", "its zip members are compressed")
def _deflated(path: Path) -> None:
    archive(path, pickled(sound()), compression=zipfile.ZIP_DEFLATED)


@malformed("a zip bomb", "file.pt", "its zip members are compressed")
def _bomb(path: Path) -> None:
    archive(path, pickled(sound()), {"data/0": bytes(16 << 20)}, compression=zipfile.ZIP_DEFLATED)


@malformed("a member there twice", "file.pt", "a zip member is there twice")
def _doubled(path: Path) -> None:
    archive(path, pickled(sound()))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("archive/data/1", bytes(16))
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))


@malformed("members over the same bytes", "file.pt", PICKLE)
def _overlapping(path: Path) -> None:
    archive(path, pickled(sound()))
    with zipfile.ZipFile(path, "a") as file:
        first = file.getinfo("archive/data/0")
        for number in range(1, 100):
            twin = zipfile.ZipInfo(f"archive/data/{number}")
            twin.file_size = twin.compress_size = first.file_size
            twin.CRC, twin.header_offset = first.CRC, first.header_offset
            file.filelist.append(twin)
        file._didModify = True


@malformed("an encrypted member", "file.pt", "encrypted|cannot be read|PyTorch checkpoint")
def _encrypted(path: Path) -> None:
    archive(path, pickled(sound()))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 8] |= 1
    path.write_bytes(content)


@malformed("an archive without data.pkl", "file.pt", PICKLE)
def _without_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/version", "3\n")


@malformed("an archive of two folders", "file.pt", PICKLE)
def _two_folders(path: Path) -> None:
    archive(path, pickled(sound()))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("other/data.pkl", b"x")


@malformed("a member with a wrong checksum", "file.pt", PICKLE)
def _wrong_sum(path: Path) -> None:
    archive(path, pickled(sound()))
    path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"))


@malformed("TorchScript", "file.pt", "a TorchScript archive or torch.export program; optimize before exporting")
def _script(path: Path) -> None:
    archive(path, pickled(sound()), {"constants.pkl": b"", "data/0": bytes(16)})


@malformed(
    "a torch.export program", "file.pt", "a TorchScript archive or torch.export program; optimize before exporting"
)
def _exported(path: Path) -> None:
    torch.export.save(torch.export.export(nn.LayerNorm(4), (torch.ones(2, 4),)), path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


@malformed("a .pt2 file", "file.pt2", "suffix '.pt2' is not one of .*; optimize before exporting")
def _pt2(path: Path) -> None:
    path.write_bytes(b"x")


@malformed("a whole pickled model", "file.pt", "asks to run more than tensors need: .*Linear.*--allow-pickle")
def _model(path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2)), path)


@malformed("a payload", "file.ckpt", r"asks to run more than tensors need: (posix|os)\.system")
def _payload(path: Path) -> None:
    write_payload(path, path.parent / "executed")


@malformed("a payload in a bare pickle", "file.bin", r"asks to run more than tensors need: (posix|os)\.system")
def _bare_payload(path: Path) -> None:
    write_payload(path, path.parent / "executed", plain=True)


@malformed("a payload of before the zip format", "file.pth", r"asks to run more than tensors need: (posix|os)\.system")
def _old_payload(path: Path) -> None:
    content = {"a": Calls(os.system, f"touch {path.parent / 'executed'}")}
    torch.save(content, path, _use_new_zipfile_serialization=False)


@malformed("one dict a billion times", "file.pt", "not a state_dict")
def _laughs(path: Path) -> None:
    inner: Any = {}
    for _ in range(5):
        inner = {f"{number}": inner for number in range(1000)}
    torch.save(inner, path)


# --- other files ----------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[str, bytes]] = {
    "an empty file": ("file.pt", b""),
    "zeros after a crash": ("file.pt", bytes(4096)),
    "a page of a web server": ("file.bin", b"<!DOCTYPE html><html><body>Not found</body></html>"),
    "a pointer of git-lfs": ("file.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
    "a gzipped file": ("file.pt", gzip.compress(bytes(1000))),
    "safetensors called .pt": ("file.pt", safetensors.torch.save({"a": torch.ones(2)})),
}
for _name, (_file, _content) in OTHERS.items():
    malformed(_name, _file, PICKLE)(lambda path, content=_content: path.write_bytes(content))
malformed("an empty .safetensors", "file.safetensors", SAFETENSORS)(lambda path: path.write_bytes(b""))
malformed("a pointer called .safetensors", "file.safetensors", SAFETENSORS)(
    lambda path: path.write_bytes(OTHERS["a pointer of git-lfs"][1])
)
malformed("torch.save called .safetensors", "file.safetensors", SAFETENSORS)(
    lambda path: torch.save({"a": torch.ones(2)}, path)
)
malformed("a pipe", "file.pt", "is no regular file")(os.mkfifo)
malformed("a link to nowhere", "file.pt", "no such file")(lambda path: path.symlink_to("gone.pt"))
malformed("a link to itself", "file.pt", "no such file|cannot be read")(lambda path: path.symlink_to("file.pt"))


@malformed("a tar file", "file.pt", PICKLE)
def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("storages"))


# --- folders --------------------------------------------------------------------------------------------------------


def shards(path: Path, change: Callable[[dict[str, Any]], object] = lambda index: None) -> Path:
    """A folder of two shards of two tensors each, its index changed; returns the index."""
    state = {name: torch.ones(2) for name in "abcd"}
    write_shards(path, state, ".safetensors", 2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))
    return index


def placed(name: Any) -> Callable[[Path], object]:
    return lambda path: shards(path, lambda index: index["weight_map"].update(a=name))


PLAIN = "is not the plain name of a"
INDICES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "an index that is no JSON": ("cannot be read", lambda path: shards(path).write_text("{")),
    "an index with a key twice": ("is there twice", lambda path: shards(path).write_text('{"a": 1, "a": 2}')),
    "an index that is a list": ("has no weight_map", lambda path: shards(path).write_text("[]")),
    "an index that is not UTF-8": ("cannot be read", lambda path: shards(path).write_bytes(b'{"\xff\xfe": 1}')),
    "an index without a map": ("has no weight_map", lambda path: shards(path, dict.clear)),
    "an index with an empty map": ("has no weight_map", lambda path: shards(path, lambda i: i["weight_map"].clear())),
    "a shard in the folder above": (PLAIN, placed("../a.safetensors")),
    "a shard by its whole path": (PLAIN, placed("/etc/a.safetensors")),
    "a shard in a folder below": (PLAIN, placed("sub/a.safetensors")),
    "a hidden shard": (PLAIN, placed(".a.safetensors")),
    "a shard with a name of 5,000 letters": (PLAIN, placed("a" * 5000 + ".safetensors")),
    "a shard that is a number": (PLAIN, placed(3)),
    "a shard with a zero byte": (PLAIN, placed("a\0.safetensors")),
    "a shard of another suffix": (PLAIN, placed("a.so")),
    "a shard that is an index": (PLAIN, placed("model.safetensors.index.json")),
    "shards of two formats": ("files of several formats", placed("a.bin")),
    "a shard that is not there": ("no such file", placed("gone.safetensors")),
    "a tensor in another shard": (
        "lacks, or holds and the index does not place there, a",
        placed("model-00002-of-00002.safetensors"),
    ),
    "a tensor the index does not name": (
        "holds and the index does not place there, a",
        lambda path: shards(path, lambda index: index["weight_map"].pop("a")),
    ),
    "a folder without a checkpoint": ("a folder without a checkpoint", Path.mkdir),
}
for _name, (_message, _write) in INDICES.items():
    malformed(_name, "folder", _message)(_write)


@malformed("a shard that is truncated", "folder", SAFETENSORS)
def _short_shard(path: Path) -> None:
    shard = shards(path).parent / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
