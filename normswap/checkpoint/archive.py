"""What a checkpoint file must be before its tensors are read: checks of bytes alone, with nothing of it executed.

torch.load and safetensors are trusted with files that passed here, and with no others.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normswap.checkpoint.errors import CheckpointError, one_line, strict_json

_MAX_HEADER = 100_000_000  # safetensors' own limit

_BYTES = {
    "BoolStorage": 1,
    "ByteStorage": 1,
    "CharStorage": 1,
    "ShortStorage": 2,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "IntStorage": 4,
    "FloatStorage": 4,
    "LongStorage": 8,
    "DoubleStorage": 8,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
    "QInt32Storage": 4,
    "UntypedStorage": 1,
}

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""safetensors' names of dtypes."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file; ``start`` and ``end`` are offsets into the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file, checked."""

    tensors: dict[str, Entry] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def safetensors_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises CheckpointError unless it is JSON without duplicate keys in which every tensor has a known dtype, exactly the
    bytes its shape needs, and the tensors fill the file from end to end without gap or overlap; OSError as ``open``.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path}: truncated, or not a safetensors file (no header that fits into the file)")
        text = file.read(length)
    try:
        header = _header(strict_json(text.decode("utf-8")), 8 + length)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({one_line(error)})") from error
    _check_coverage(path, header, 8 + length, size)
    return header


def _header(data: Mapping[str, Any], base: int) -> Header:
    metadata = data.get("__metadata__", {})
    if not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata holds more than text")
    return Header({name: _entry(name, e, base) for name, e in data.items() if name != "__metadata__"}, dict(metadata))


def _entry(name: str, entry: Mapping[str, Any], base: int) -> Entry:
    dtype, shape, (start, end) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
    if dtype is None:
        raise ValueError(f"{name}: the dtype {entry['dtype']!r} is not known")
    numbers = [*shape, start, end]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(entry) != 3:
        raise ValueError(f"{name}: shape and offsets must be whole numbers from 0")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {end - start} bytes are not what its shape and dtype need")
    return Entry(dtype, tuple(shape), base + start, base + end)


def _check_coverage(path: Path, header: Header, begin: int, size: int) -> None:
    position = begin
    for entry in sorted(header.tensors.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            what = "overlap" if entry.start < position else "leave a gap"
            raise CheckpointError(f"{path}: truncated, or not a safetensors file (its tensors {what})")
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{path}: truncated, or not a safetensors file (its tensors end at byte {position}, the file at {size})"
        )


# --- pickles ------------------------------------------------------------------------------------------------------


def check_pickle(path: Path) -> bool:
    """Check a file of torch.save; returns whether it is a zip archive, which can be memory-mapped.

    Raises CheckpointError for TorchScript and exported programs, compressed, encrypted or doubled zip members, storages
    that are larger than what the file holds of them; OSError as ``open``.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive.infolist())
            _check_storages(path, archive)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises nearly anything on a damaged file; it is told, not lost
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint ({one_line(error)})") from error
    return True


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    names = [m.filename for m in members]
    leaves = {name.partition("/")[2] for name in names}
    if "constants.pkl" in leaves:
        raise CheckpointError(
            f"{path}: a TorchScript archive; optimize before exporting: give the eager model's weights"
        )
    if any(leaf.startswith("models/") or leaf == "archive_format" for leaf in leaves):
        raise CheckpointError(f"{path}: a torch.export program; optimize before exporting: give the model's weights")
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
        raise CheckpointError(f"{path}: its zip members are compressed; write it anew with torch.save")
    if any(m.flag_bits & 1 for m in members):
        raise CheckpointError(f"{path}: its zip members are encrypted; write it anew with torch.save")
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (a zip member is there twice)")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (its zip members have no common folder)")
    ordered = sorted(members, key=lambda m: m.header_offset)
    if any(m.header_offset + m.file_size >= after.header_offset for m, after in itertools.pairwise(ordered)):
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (its zip members overlap)")


def _check_storages(path: Path, archive: zipfile.ZipFile) -> None:
    sizes = {m.filename.partition("/")[2]: m for m in archive.infolist()}
    if "data.pkl" not in sizes:
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (it has no data.pkl)")
    for kind, key, count in _storages(archive.read(sizes["data.pkl"])):
        member = sizes.get(f"data/{key}")
        if kind not in _BYTES or type(count) is not int or member is None:
            raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (no storage {key} of kind {kind})")
        if not 0 <= count * _BYTES[kind] <= member.file_size:
            raise CheckpointError(
                f"{path}: storage {key} is said to have {count * _BYTES[kind]} bytes, the file holds {member.file_size}"
            )
        archive.open(member).close()  # compares the member's own header with the directory's


def _storages(pickled: bytes) -> Iterator[tuple[str, str, Any]]:
    """Kind, key and number of elements of each storage a pickle asks for. Raises what unpickling raises."""
    reader = _Reader(io.BytesIO(pickled))
    try:
        reader.load()
    except TypeError as error:  # what the inert stand-ins cannot do, tensors do not need either
        raise ValueError(f"its pickle is not one of tensors ({one_line(error)})") from error
    yield from reader.storages


class _Inert:
    """Stands for every class and function a pickle names, and does nothing."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass

    def extend(self, _values: Any) -> None:
        pass

    append = add = extend


class _Reader(pickle._Unpickler):  # type: ignore[name-defined,misc]  # in Python: the C one reserves memory by the file's word
    """Unpickles without running anything, and notes the storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: list[tuple[str, str, Any]] = []

    def find_class(self, module: str, name: str) -> type:
        return type(f"{module}.{name}", (_Inert,), {})

    def persistent_load(self, pid: Any) -> _Inert:
        if not isinstance(pid, tuple) or len(pid) < 5 or not isinstance(pid[1], type):
            raise ValueError("a storage is not described as torch.save does")
        self.storages.append((pid[1].__name__.rpartition(".")[2], str(pid[2]), pid[4]))
        return _Inert()

    def get_extension(self, _code: int) -> Any:
        raise ValueError("extension codes are not understood")
