"""What an archive of torch.save must be before torch.load reads it: checks of bytes alone, nothing of it executed."""

from __future__ import annotations

import io
import itertools
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normswap.checkpoint.errors import CheckpointError, one_line

_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4", "Untyped"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element of each kind of storage that a pickle may name."""


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
        size = _BYTES.get(kind.removesuffix("Storage"), 0)
        if not size or type(count) is not int or member is None:
            raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (no storage {key} of kind {kind})")
        if not 0 <= count * size <= member.file_size:
            raise CheckpointError(
                f"{path}: storage {key} is said to have {count * size} bytes, the file holds {member.file_size}"
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
