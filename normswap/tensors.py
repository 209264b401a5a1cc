"""Tensors by name, from and to .pt, .pth and .safetensors files.

A .pt file is read with ``weights_only=True`` always: nothing a file names is ever executed. Two names of one tensor
(tied weights) stay one tensor in every format.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normswap.files import replacing
from normswap.plan import NormswapError

PICKLE_SUFFIXES = (".pt", ".pth")
SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors")

_ORDER = "normswap.order"
_VERSIONS = "normswap.state_dict_metadata"
_FREE_TEXT = "_safetensors_metadata"
_SHOWN = 10


class CheckpointError(NormswapError):
    """A checkpoint, or the model it belongs to, cannot be read, built or written: one line says why."""


def listed(names: list[str]) -> str:
    """The first ten names, and how many there are beyond them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_suffix(path: Path) -> str:
    """The suffix of ``path``. Raises CheckpointError unless it is one of SUFFIXES."""
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path}: suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}")
    return path.suffix


def same_format(one: Path, other: Path) -> bool:
    """Whether two checkpoint paths hold the same kind of file (.pt and .pth do)."""
    return (one.suffix in PICKLE_SUFFIXES) == (other.suffix in PICKLE_SUFFIXES)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a flat state_dict: its tensors, on the CPU and in the file's order, and the file's free-text metadata.

    The dict is an OrderedDict and keeps the ``_metadata`` (module versions) that ``load_state_dict`` looks for.
    Tensors are memory-mapped where the format allows, so replace a file that was read, never write into it.
    A safetensors file has no order of its own: the one recorded by ``write_tensors`` is used, else names are sorted.

    Raises CheckpointError for a missing, truncated or foreign file, another suffix, a pickle that names more than
    tensors, and for anything but a flat dict of tensors.
    """
    path = Path(path)
    suffix = check_suffix(path)
    if not path.is_file():
        what = "is a folder, not a checkpoint file" if path.is_dir() else "no such file"
        raise CheckpointError(f"{path}: {what}")
    return read_as(suffix, path)


def read_as(suffix: str, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """``read_tensors`` for a file whose own name does not show its format."""
    return _read_pickle(path) if suffix in PICKLE_SUFFIXES else _read_safetensors(path)


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


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two dicts hold the same names in the same order, and under each the same dtype, shape and bits."""
    return list(one) == list(other) and all(_same_bits(one[name], other[name]) for name in one)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is not torch.strided or one.is_quantized:
        return torch.equal(one, other)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _read_pickle(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        archive = _is_plain_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(_unpickling_message(path, error)) from error
    except Exception as error:  # a damaged file makes torch.load raise nearly anything; it is told below, not lost
        raise CheckpointError(f"{path}: truncated, or not a PyTorch checkpoint ({one_line(error)})") from error
    tensors = _flat(path, loaded)
    text = getattr(loaded, _FREE_TEXT, {})
    return tensors, {str(k): str(v) for k, v in text.items()} if isinstance(text, Mapping) else {}


def _is_plain_archive(path: Path) -> bool:
    """Whether this is a zip file, as torch.save writes since 1.6, and so can be mapped."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(m.filename.endswith("/constants.pkl") for m in members):
        raise CheckpointError(f"{path}: a TorchScript archive; optimize the eager model before scripting it")
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise CheckpointError(f"{path}: its zip members are compressed; write it anew with torch.save")
    return True


def _unpickling_message(path: Path, error: Exception) -> str:
    try:
        names = list(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, OSError, RuntimeError, pickle.UnpicklingError):  # files older than the zip format
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    if not names:
        return f"{path}: truncated, or not a PyTorch checkpoint of tensors alone"
    return (
        f"{path}: refused, it asks to run more than tensors need: {listed(names)}; "
        "save model.state_dict() instead of the model"
    )


def _flat(path: Path, loaded: object) -> dict[str, Tensor]:
    if isinstance(loaded, Mapping) and loaded and all(isinstance(k, str) for k in loaded):
        others = [k for k, v in loaded.items() if not isinstance(v, Tensor)]
        if not others:
            return loaded if isinstance(loaded, dict) else OrderedDict(loaded)
        found = listed([f"{k} ({_what(v)})" for k, v in loaded.items()])
        nested = next((k for k in others if isinstance(loaded[k], Mapping)), None)
        cure = f"; save the inner one by itself: torch.save(checkpoint[{nested!r}], ...)" if nested is not None else ""
        raise CheckpointError(f"{path}: not a flat state_dict (names to tensors), it holds {found}{cure}")
    raise CheckpointError(f"{path}: not a state_dict (names to tensors) but {_what(loaded)}")


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
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
    tensors: OrderedDict[str, Tensor] = OrderedDict((name, named[name]) for name in order)
    if isinstance(versions, dict):
        tensors._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    own = {_ORDER, _VERSIONS, *tied}
    return tensors, {k: v for k, v in metadata.items() if k not in own}


def _recorded(path: Path, metadata: Mapping[str, str], key: str, default: Any) -> Any:
    if key not in metadata:
        return default
    try:
        return json.loads(metadata[key])
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


def _identity(name: str, tensor: Tensor) -> object:
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return name
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their first names, each owning its storage: views of larger ones are copied out."""
    kept: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name in dict.fromkeys(_first_names(tensors).values()):
        tensor = tensors[name].detach().resolve_conj().resolve_neg()
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
                tensor = tensor.clone()
            storages.add(storage.data_ptr())
        kept[name] = tensor
    return kept
