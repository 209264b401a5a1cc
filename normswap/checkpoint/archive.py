"""What an archive of torch.save must be before torch.load reads it: checks of bytes alone, nothing of it executed."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

from normswap.checkpoint.errors import CheckpointError, one_line


def check_pickle(path: Path) -> set[int] | None:
    """Check a file of torch.save; returns the sizes in bytes of the storages in its zip archive, which can be
    memory-mapped, or None for one of before these.

    Raises CheckpointError for TorchScript and exported programs, compressed, encrypted or doubled zip members; OSError
    as ``open``.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(path, archive.infolist())
            for member in archive.infolist():
                archive.open(member).close()  # compares the member's own header with the directory's
            return {m.file_size for m in archive.infolist() if "/data/" in m.filename}
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises nearly anything on a damaged file; it is told, not lost
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint ({one_line(error)})") from error


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
    if "data.pkl" not in leaves:
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (it has no data.pkl)")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (its zip members have no common folder)")
    ordered = sorted(members, key=lambda m: m.header_offset)
    if any(m.header_offset + m.file_size >= after.header_offset for m, after in itertools.pairwise(ordered)):
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (its zip members overlap)")
