"""Folders of torch.distributed.checkpoint (DCP), read and written by one process, without running what they name."""

from __future__ import annotations

import enum
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from normswap.checkpoint.errors import CheckpointError, failing, one_line
from normswap.checkpoint.tensors import PATHS, check_held

_DCP = "torch.distributed.checkpoint."
_NAMES = {
    *("torch.Size", "torch.device", "torch.serialization._get_layout", "collections.OrderedDict"),
    *(f"{_DCP}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
}


def read_distributed(path: Path) -> dict[str, Any]:
    """The tensors of the DCP folder with the metadata file ``path``, nested as they were saved. Raises CheckpointError,
    also where the metadata asks for more than data; what else than tensors it holds is left out."""
    with _telling(f"{path}: truncated, or not a distributed checkpoint"):
        reader = _Reader(path.parent)
        metadata = reader.read_metadata()
        entries = metadata.state_dict_metadata
        shaped = {n: e for n, e in entries.items() if isinstance(n, str) and isinstance(e, TensorStorageMetadata)}
        flat = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in shaped.items()}
        dcp.load(flat, storage_reader=reader, no_dist=True)
        planned = metadata.planner_data or {name: (name,) for name in flat}
        paths = {n: path for n, path in planned.items() if n in flat and all(isinstance(key, str) for key in path)}
        return unflatten_state_dict({name: flat[name] for name in paths}, paths)


def write_distributed(folder: Path, state: Mapping[str, Any], out: Path) -> None:
    """Write ``state`` into the new folder ``folder``, which shall become ``out``. Raises CheckpointError, also for what
    DCP cannot hold."""
    check_held("torch.distributed.checkpoint", state)
    with _telling(f"{out}: cannot be written", str(folder), str(out)):
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@contextmanager
def _telling(what: str, folder: str = "", out: str = "") -> Iterator[None]:
    """``failing``, with the cause of what DCP raises, ``out`` in the place of ``folder``, and without its warning of a
    process that is alone, as meant."""
    cause = lambda error: one_line(next(iter(getattr(error, "failures", {}).values()), (error,))[0])  # noqa: E731
    tell = lambda error: cause(error).replace(folder, out)  # noqa: E731
    with failing(what, (Exception, dcp.CheckpointException), tell=tell), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _Reader(dcp.FileSystemReader):
    """Reads the metadata, which is a pickle, as data alone."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        found = _Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        places = [info.relative_path for info in (found.storage_data or {}).values()]
        if not isinstance(found, Metadata) or any(Path(place).name != str(place) for place in places):
            raise ValueError("its metadata is of another kind, or names files elsewhere")
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "builtins.getattr":  # as some versions of Python 3.11 write the members of enums
            return _member
        if (kind := PATHS.get(full)) is not None:
            return kind
        found = super().find_class(module, name) if full in _NAMES or module in ("torch", f"{_DCP}metadata") else None
        plain = isinstance(found, torch.dtype | torch.memory_format | torch.layout)
        if full in _NAMES or plain or (isinstance(found, type) and found.__module__ == f"{_DCP}metadata"):
            return found
        raise _refused(full)


def _member(owner: Any, name: Any) -> enum.Enum:
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise _refused("builtins.getattr")


def _refused(name: str) -> CheckpointError:
    return CheckpointError(f".metadata: refused, it asks to run more than tensors need: {name}")
