"""Tensors by name, from and to the files that PyTorch people keep them in.

A pickle is read with ``weights_only=True``, so that nothing a file names is executed, unless the caller says it may be.
Two names of one tensor (tied weights) stay one tensor in every format.
"""

from __future__ import annotations

import argparse
import codecs
import json
import pathlib
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normswap.checkpoint.archive import check_pickle
from normswap.checkpoint.errors import CheckpointError, listed, one_line, strict_json
from normswap.checkpoint.files import replacing
from normswap.plan import NormswapError

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors")

_ORDER = "normswap.order"
_VERSIONS = "normswap.state_dict_metadata"
_FREE_TEXT = "_safetensors_metadata"


def check_suffix(path: Path) -> str:
    """The suffix of ``path``. Raises CheckpointError unless it is one of SUFFIXES."""
    if path.suffix not in SUFFIXES:
        cure = "; optimize before exporting: give the model's weights" if path.suffix == ".pt2" else ""
        raise CheckpointError(f"{path}: suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}{cure}")
    return path.suffix


def same_format(one: Path, other: Path) -> bool:
    """Whether two checkpoint paths hold the same kind of file (.pt, .pth, .bin and .ckpt do)."""
    return (one.suffix in PICKLE_SUFFIXES) == (other.suffix in PICKLE_SUFFIXES)


def load_file(path: Path, *, suffix: str | None = None, allow_pickle: bool = False) -> tuple[Any, dict[str, str]]:
    """What a checkpoint file holds, tensors on the CPU, and its free-text metadata; ``suffix`` where its own misleads.

    The tensors are memory-mapped where the format allows: such a file may be replaced, never written into.
    ``allow_pickle`` lets a pickle run what it names. A safetensors file has no order of its own: the one recorded by
    ``write_tensors`` is used, else names are sorted.

    Raises CheckpointError for a missing, truncated or foreign file, and for a pickle that names more than tensors.
    """
    try:
        if not path.is_file():
            what = "is a folder, not a checkpoint file" if path.is_dir() else "no such file"
            raise CheckpointError(f"{path}: {what}")
        suffix = suffix or check_suffix(path)
        return _load_pickle(path, allow_pickle) if suffix in PICKLE_SUFFIXES else _load_safetensors(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path`` in the format its suffix names, replacing it atomically.

    Values, dtypes, shapes, names and their order come back equal from ``read_tensors``, and so do ``metadata``
    and the dict's ``_metadata``. ``path`` may be the file the tensors were read from. Raises CheckpointError and leaves
    ``path`` as it was when the format cannot hold a tensor or the disk refuses.
    """
    path = Path(path)
    check_suffix(path)
    try:
        with replacing() as files:
            files.write(path, tensor_writer(path, tensors, metadata or {}))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({one_line(error)})") from error


def tensor_writer(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Callable[[Path], None]:
    """What fills a file that shall become ``path`` with ``tensors``; it raises CheckpointError, or OSError."""
    write = _write_pickle if check_suffix(path) in PICKLE_SUFFIXES else _write_safetensors

    def fill(target: Path) -> None:
        try:
            write(target, tensors, metadata)
        except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError, SafetensorError) as error:
            if isinstance(error, NormswapError):
                raise
            raise CheckpointError(f"{path}: cannot be written ({one_line(error)})") from error

    return fill


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dicts hold the same names in the same order, and under each the same dtype, shape and bits."""
    return list(one) == list(other) and difference(one, other) is None


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """One line on how the tensors of a dict differ from the expected ones, None when they do not."""
    told = [
        f"{len(names)} {what}: {listed(names)}"
        for what, names in (
            ("missing", [name for name in expected if name not in found]),
            ("more", [name for name in found if name not in expected]),
            ("changed", [n for n in expected if n in found and not _same_bits(expected[n], found[n])]),
        )
        if names
    ]
    return "; ".join(told) or None


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided or one.is_quantized:
        return torch.equal(one.cpu(), other.cpu())
    return torch.equal(_bits(one.cpu()), _bits(other.cpu()))


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 else flat


def _load_pickle(path: Path, allow_pickle: bool) -> tuple[Any, dict[str, str]]:
    sizes = check_pickle(path)
    with open(path, "rb") as file:
        if sizes is None and file.read(1) != b"\x80":  # tar files of before 0.4 are left to PyTorch to convert
            raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint (neither a zip file nor a pickle)")
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_harmless()):
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            place: Any = "cpu" if sizes is None else partial(_checked_storage, path, sizes)
            loaded = torch.load(path, map_location=place, weights_only=not allow_pickle, mmap=sizes is not None)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(_unpickling_message(path, error)) from error
    except Exception as error:  # a damaged file makes torch.load raise nearly anything; it is told below, not lost
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint ({one_line(error)})") from error
    text = getattr(loaded, _FREE_TEXT, {})
    return loaded, {str(k): str(v) for k, v in text.items()} if isinstance(text, Mapping) else {}


def _checked_storage(path: Path, sizes: set[int], storage: Any, _location: str) -> Any:
    """``storage``, on the CPU: a mapped one may be said to be larger than what the file holds of it."""
    if storage.nbytes() not in sizes:
        raise CheckpointError(f"{path}: a storage of {storage.nbytes()} bytes is none of those that the file holds")
    return storage


def _harmless() -> list[Any]:
    """What training scripts put beside the tensors, and what makes it when it is read: plain data."""
    paths = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]
    arrays = [type(np.dtype(kind)) for kind in np.typecodes["All"]]
    makers = [np._core.multiarray.scalar, np._core.multiarray._reconstruct, codecs.encode]  # type: ignore[attr-defined]
    old = [(make, f"numpy.core.multiarray.{make.__name__}") for make in makers[:2]]  # numpy before 2.0
    return [argparse.Namespace, *paths, np.dtype, np.ndarray, *arrays, *makers, *old]


def _unpickling_message(path: Path, error: Exception) -> str:
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # files older than the zip format, or damaged ones
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    if not names:
        return f"{path}: truncated, or not a PyTorch checkpoint of tensors alone"
    return (
        f"{path}: refused, it asks to run more than tensors need: {listed(names)}; save model.state_dict() instead of "
        "the model, or pass allow_pickle (--allow-pickle) if you trust where it comes from"
    )


def _load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        with open(path, "rb") as file:  # safetensors takes the last of two entries of one name
            strict_json(file.read(int.from_bytes(file.read(8), "little")))
    except (SafetensorError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({one_line(error)})") from error
    if not stored:
        raise CheckpointError(f"{path}: holds no tensors")
    # safetensors.torch.save_model's own record of tied names: each dropped name with the one that was kept.
    tied = {name: kept for name, kept in metadata.items() if name not in stored and kept in stored}
    named = {**stored, **{name: stored[kept] for name, kept in tied.items()}}
    order = _recorded(path, metadata, _ORDER, sorted(named))
    versions = _recorded(path, metadata, _VERSIONS, None)
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(named):
        raise CheckpointError(f"{path}: the order recorded in it names other tensors than it holds; write it anew")
    tensors: OrderedDict[str, Tensor] = OrderedDict((str(n), named[str(n)]) for n in order)
    if isinstance(versions, dict):
        tensors._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    own = {_ORDER, _VERSIONS, *tied}
    return tensors, {k: v for k, v in metadata.items() if k not in own}


def _recorded(path: Path, metadata: Mapping[str, str], key: str, default: Any) -> Any:
    if key not in metadata:
        return default
    try:
        return strict_json(metadata[key])
    except ValueError as error:
        raise CheckpointError(f"{path}: its metadata {key} is not JSON ({one_line(error)})") from error


def _write_pickle(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    state: OrderedDict[str, Tensor] = OrderedDict()
    kept = _independent(tensors)
    for name, first in _first_names(tensors).items():
        state[name] = kept[first]
    if (versions := getattr(tensors, "_metadata", None)) is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    if metadata:
        setattr(state, _FREE_TEXT, dict(metadata))
    with open(path, "wb") as file:  # by path, torch.save would write the temporary name into the file
        torch.save(state, file)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor) or name == "__metadata__"]
    if others:
        raise CheckpointError(f"safetensors cannot hold {listed(others)}; name a file that ends in .pt")
    first = _first_names(tensors)
    text = dict(metadata)
    # A tied name the metadata already uses for something else cannot be recorded: such a tensor is written twice.
    tied = {name: kept for name, kept in first.items() if kept != name and text.get(name, kept) == kept}
    stored = {name: t for name, t in _independent(tensors).items() if name not in tied}
    stored.update({name: tensors[name].detach().clone() for name in first if name not in tied and name not in stored})
    text.update(tied)
    if list(tensors) != sorted(tensors):
        text[_ORDER] = json.dumps(list(tensors))
    if (versions := getattr(tensors, "_metadata", None)) is not None:
        text[_VERSIONS] = json.dumps(versions)
        if json.loads(text[_VERSIONS]) != versions:
            raise CheckpointError("the state_dict's module metadata is not JSON; write a .pt file instead")
    save_file({name: t.contiguous() for name, t in stored.items()}, path, metadata=text or None)


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name with the first name of the same tensor (the same memory seen the same way)."""
    seen: dict[object, str] = {}
    return {name: seen.setdefault(_identity(name, t), name) for name, t in tensors.items()}


def _identity(name: str, tensor: Any) -> object:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return name
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their first names, each owning its storage: views of larger ones are copied out."""
    kept: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in dict.fromkeys(_first_names(tensors).values()):
        if not isinstance(tensors[name], Tensor):
            kept[name] = tensors[name]
            continue
        tensor = tensors[name].detach().resolve_conj().resolve_neg()
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
                tensor = tensor.clone()
            storages.add(storage.data_ptr())
        kept[name] = tensor
    return kept
