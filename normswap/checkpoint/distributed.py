"""Folders of torch.distributed.checkpoint (DCP), read and written by one process, without running what they name."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from normswap.checkpoint.errors import CheckpointError, one_line

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint."
_NAMES = {
    *("torch.Size", "torch.device", "torch.serialization._get_layout", "collections.OrderedDict", "pathlib.PosixPath"),
    *(f"{_DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
}


def read_distributed(path: Path) -> dict[str, Any]:
    """The tensors of the DCP folder with the metadata file ``path``, nested as they were saved. Raises CheckpointError,
    also where the metadata asks for more than data; what else than tensors it holds is left out."""
    try:
        reader = _Reader(path.parent)
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        shaped = {n: e for n, e in entries.items() if isinstance(n, str) and isinstance(e, TensorStorageMetadata)}
        flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in shaped.items()}
        with _alone():
            dcp.load(flat, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
        return _nested(flat, metadata.planner_data or {})
    except CheckpointError:
        raise
    except (Exception, dcp.CheckpointException) as error:  # type: ignore[attr-defined]  # it raises nearly anything on damage
        cause = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        raise CheckpointError(f"{path}: truncated, or not a distributed checkpoint ({one_line(cause)})") from error


def write_distributed(folder: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` into the new folder ``folder``. Raises what DCP raises."""
    with _alone():
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)  # type: ignore[attr-defined]


@contextmanager
def _alone() -> Iterator[None]:
    """DCP warns of a process that is alone, which this one is meant to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _Reader(dcp.FileSystemReader):  # type: ignore[attr-defined,misc]
    """Reads the metadata, which is a pickle, as data alone."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        found = _Unpickler(io.BytesIO((Path(self.path) / METADATA).read_bytes())).load()
        if not isinstance(found, Metadata):
            raise ValueError("its metadata is of another kind")
        for info in (found.storage_data or {}).values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise ValueError("its metadata names files elsewhere")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = dcp.metadata.StorageMeta()  # type: ignore[attr-defined]
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _NAMES:
            return super().find_class(module, name)
        if module in ("torch", f"{_DCP}metadata"):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype | torch.memory_format | torch.layout):
                return found
            if isinstance(found, type) and found.__module__ == f"{_DCP}metadata":
                return found
        raise CheckpointError(f"{METADATA}: refused, it asks to run more than tensors need: {full}")


def _nested(flat: Mapping[str, Tensor], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the keys by which they were saved; those in lists, which no state_dict has, are left out."""
    found: dict[str, Any] = {}
    for name, tensor in flat.items():
        *outer, last = paths.get(name, (name,))
        if not all(isinstance(key, str) for key in (*outer, last)):
            continue
        into = found
        for key in outer:
            into = into.setdefault(key, {})
        into[last] = tensor
    return found
