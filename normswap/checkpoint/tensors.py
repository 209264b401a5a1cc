"""Tensors by name, from and to the files that PyTorch people keep them in, of which nothing is executed unasked.

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
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from normswap.checkpoint.arrays import MAKERS, plain
from normswap.checkpoint.errors import CheckpointError, MissingError, check, counted, failing, listed, strict_json
from normswap.held import strided

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*PICKLE_SUFFIXES, ".safetensors")

_FOREIGN = "truncated, or not a PyTorch checkpoint"
_ORDER = "normswap.order"
_VERSIONS = "normswap.state_dict_metadata"
_FREE_TEXT = "_safetensors_metadata"
_FORMAT = "format"  # in the metadata: whose tensors they are, "pt"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: few large ones are faster compared
_EXPANDED = 1 << 30  # bytes that an expanded tensor may stand for

PATHS: dict[str, type[pathlib.PurePath]] = {
    f"{module}.{kind.__name__}": kind
    for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    for module in ("pathlib", "pathlib._local")
}
"""Of what a path is made when it is read, by the names that versions of Python write; the latter is 3.13's."""
_HARMLESS = [argparse.Namespace, codecs.encode, *((kind, name) for name, kind in PATHS.items()), *MAKERS]
"""What training scripts put beside the tensors, and what makes it when it is read: plain data."""


def is_pickle(path: Path) -> bool:
    """Whether ``path`` is named as what torch.save writes. Raises CheckpointError for no suffix of SUFFIXES."""
    cure = "; optimize before exporting: give the model's weights" if path.suffix == ".pt2" else ""
    check(path.suffix in SUFFIXES, f"{path}: suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}{cure}")
    return path.suffix in PICKLE_SUFFIXES


def load_file(path: Path, *, at: Path | None = None, allow_pickle: bool = False) -> tuple[Any, dict[str, str]]:
    """What the checkpoint file ``path``, which may still lie ``at`` another name, holds, with its free-text metadata.

    The tensors are on the CPU, memory-mapped where the format allows: such a file may be replaced, never written into.
    ``allow_pickle`` lets a pickle run what it names. Raises CheckpointError, also for a pickle that names more."""
    with failing(f"{path}: cannot be read", OSError):
        check(not path.is_dir(), f"{path}: is a folder, not a checkpoint file")
        found = at or path
        check(found.is_file(), f"{path}: {'is no regular file' if found.exists() else 'no such file'}")
        return _load_pickle(found, allow_pickle) if is_pickle(path) else _load_safetensors(found)


def tensor_writer(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Callable[[Path], None]:
    """What fills a file that shall become ``path`` with ``tensors``; ``load_file`` gives back their bits, names, order,
    ``_metadata`` and the ``metadata``. Raises CheckpointError, also later, for what the format cannot hold."""
    write = _write_pickle if is_pickle(path) else _write_safetensors
    return failing(f"{path}: cannot be written")(partial(write, tensors=tensors, metadata=metadata))


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dicts hold the same names in the same order, and under each the same dtype, shape and bits."""
    return list(one) == list(other) and difference(one, other) is None


def difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """One line on how the tensors of a dict differ from the expected ones, None when they do not."""
    changed = [n for n in expected if n in found and not _same_bits(expected[n], found[n])]
    missing, more = ([n for n in one if n not in other] for one, other in ((expected, found), (found, expected)))
    return counted(missing=missing, more=more, changed=changed) or None


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and _same_data(one, other)
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.is_quantized:
        return torch.equal(one.cpu(), other.cpu())
    if one.layout is not torch.strided:
        return all(map(_same_bits, strided(one.detach()), strided(other.detach())))
    bits = _BITS[min(one.itemsize, 8)]
    return torch.equal(*(t.detach().cpu().resolve_conj().resolve_neg().ravel().view(bits) for t in (one, other)))


def _same_data(one: Any, other: Any) -> bool:
    """Whether two values of one type, such as extra state, are the same: tensors and arrays in them by their bits, NaN
    as NaN."""
    if isinstance(one, argparse.Namespace):
        return _same_data(vars(one), vars(other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same_bits(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_bits, one, other))
    if isinstance(one, np.ndarray | np.generic):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return _same_bits(one.tolist(), other.tolist()) if one.dtype.hasobject else one.tobytes() == other.tobytes()
    return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor: of a sparse one, those of its indices and values."""
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in strided(tensor.detach()))


def check_held(what: str, state: Mapping[str, Any], dtypes: Collection[torch.dtype] = ()) -> None:
    """Raise CheckpointError where ``state`` holds what a file of torch.save can and ``what`` cannot: what is no tensor,
    is sparse or quantized, or of ``dtypes``."""
    others = [f"{name} ({kind})" for name, value in state.items() if (kind := _beyond(value, dtypes)) is not None]
    check(not others, f"{what} cannot hold {listed(others)}; name a file that ends in .pt")


def _beyond(value: Any, dtypes: Collection[torch.dtype]) -> str | None:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout is not torch.strided:
        return str(value.layout)
    return str(value.dtype) if value.is_quantized or value.dtype in dtypes else None


def check_layouts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError when elements of a tensor share memory, or two tensors overlap; tied ones, and expanded
    ones up to 1 GiB, are fine."""
    cure = "save copies: {name: tensor.clone() for name, tensor in state.items()}"
    spans = []
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
            own = tensor[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())]
            sound = not shares_memory_within(own) and (own.numel() == tensor.numel() or tensor.nbytes <= _EXPANDED)
            seen = f"{list(tensor.shape)} over strides {list(tensor.stride())}"
            check(sound, f"{path}: {name} has shape {seen}: its elements share memory; {cure}")
            last = sum(stride * (size - 1) for stride, size in zip(own.stride(), own.shape, strict=True))
            spans.append((own.data_ptr(), own.data_ptr() + (last + 1) * own.itemsize, name))
    before = (0, 0, "")
    for span in sorted(spans):
        apart = span[0] >= before[1] or span[:2] == before[:2]
        check(apart, f"{path}: {before[2]} and {span[2]} overlap in memory; {cure}")
        before = max(before, span, key=lambda s: s[1])


def shares_memory_within(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor may lie at one place; as in ATen, by the strides alone."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _load_pickle(path: Path, allow_pickle: bool) -> tuple[Any, dict[str, str]]:
    with open(path, "rb") as file:
        start = file.read(4)
    mapped = start == b"PK\x03\x04"
    known = mapped or start[:1] == b"\x80"  # tar files of before 0.4 are left to PyTorch to convert
    check(known, f"{path}: {_FOREIGN} (neither a zip file nor a pickle)")
    with failing(f"{path}: {_FOREIGN}"), warnings.catch_warnings(), _harmless_allowed():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        sizes = _storage_sizes(path) if mapped else None

        def checked(storage: Any, _location: str) -> Any:
            """``storage``, on the CPU: a mapped one may be said to be larger than what the file holds of it."""
            lies = f"{path}: a storage of {storage.nbytes()} bytes is none of those that the file holds"
            check(sizes is None or storage.nbytes() in sizes, lies)
            return storage

        code = (ImportError, AttributeError) if allow_pickle else ()
        cure = "{} ({}); put its module on PYTHONPATH, or save model.state_dict() instead of the model"
        try:
            with failing(f"{path}: names code that is not here", code, form=cure, kind=MissingError):
                loaded = torch.load(path, map_location=checked, weights_only=not allow_pickle, mmap=mapped)
        except pickle.UnpicklingError as error:
            names: list[str] = []
            with suppress(Exception):  # files older than the zip format, or damaged ones
                names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            names = names or re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
            check(names, f"{path}: {_FOREIGN} of tensors alone")
            asks = f"refused, it asks to run more than tensors need: {listed(names)}"
            cure = "pass allow_pickle (--allow-pickle) if you trust where it comes from"
            raise CheckpointError(f"{path}: {asks}; save model.state_dict() instead of the model, or {cure}") from error
    if not allow_pickle:
        asks = "{} ({}); pass allow_pickle (--allow-pickle) if you trust where it comes from"
        with failing(f"{path}: an array beside its tensors cannot be read", form=asks):
            loaded = plain(loaded, {})
    text = getattr(loaded, _FREE_TEXT, {})
    return loaded, {str(k): str(v) for k, v in text.items()} if isinstance(text, Mapping) else {}


@contextmanager
def _harmless_allowed() -> Iterator[None]:
    """What a person allows torch.load besides stays allowed, but for what has one of these names."""
    known = torch.serialization.get_safe_globals()
    ours = {*map(_name_of, _HARMLESS)}
    others: list[Any] = [one for one in known if _name_of(one) not in ours]
    try:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*others, *_HARMLESS])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def _name_of(one: Any) -> str:
    """The name in a pickle of what is allowed, as torch has it."""
    return str(one[1]) if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}"


def _storage_sizes(path: Path) -> set[int]:
    """The sizes in bytes of the storages in an archive. Raises CheckpointError for what torch.load would map wrongly,
    or would name no cure for; BadZipFile and others for damage. Nothing of it is executed."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        leaves = {m.filename.partition("/")[2] for m in members}
        stored = all(m.compress_type == zipfile.ZIP_STORED and m.file_size == m.compress_size for m in members)
        program = {"constants.pkl", "archive_format"} & leaves or any(leaf.startswith("models/") for leaf in leaves)
        kind = "a TorchScript archive or torch.export program"
        check(not program, f"{path}: {kind}; optimize before exporting: give the eager model's weights")
        check(stored, f"{path}: its zip members are compressed; write it anew with torch.save")
        check(len(leaves) == len(members), f"{path}: {_FOREIGN} (a zip member is there twice)")
        for member in members:
            archive.open(member).close()  # compares the member's own header with the directory's
        return {m.file_size for m in members if "/data/" in m.filename}


def _write_pickle(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    state = OrderedDict(_independent(tensors))
    if (versions := getattr(tensors, "_metadata", None)) is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    if metadata:
        setattr(state, _FREE_TEXT, dict(metadata))
    with open(path, "wb") as file:  # by path, torch.save would write the temporary name into the file
        torch.save(state, file)


def _load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with failing(f"{path}: truncated, or not a safetensors file"):
        with safe_open(path, framework="pt", device="cpu") as file:
            text = dict(file.metadata() or {})
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        with open(path, "rb") as file:  # safetensors takes the last of two entries of one name
            strict_json(file.read(int.from_bytes(file.read(8), "little")))
    check(stored, f"{path}: holds no tensors")
    # safetensors.torch.save_model's own record of tied names: each dropped name with the one that was kept.
    tied = {n: kept for n, kept in text.items() if n not in stored and kept in stored and n != _FORMAT}
    named = {**stored, **{name: stored[kept] for name, kept in tied.items()}}
    foreign = f"{path}: its metadata {_ORDER} or {_VERSIONS} is not of its tensors"
    with failing(foreign, (ValueError, KeyError, TypeError)):
        order = strict_json(text.pop(_ORDER, "null"))
        versions = strict_json(text.pop(_VERSIONS, "null"))
        tensors = OrderedDict((name, named.pop(name)) for name in (sorted(named) if order is None else order))
    check(not named, f"{path}: the order recorded in it names other tensors than it holds; write it anew")
    if isinstance(versions, dict):
        tensors._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return tensors, {name: value for name, value in text.items() if name not in tied}


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    check("__metadata__" not in tensors, "safetensors cannot hold __metadata__; name a file that ends in .pt")
    check_held("safetensors", tensors, (torch.complex32, torch.complex128))
    text, stored, kept = dict(metadata), dict[str, Tensor](), dict[int, str]()
    for name, tensor in _independent(tensors).items():
        first = kept.setdefault(id(tensor), name)
        if first == name:
            stored[name] = tensor.contiguous()
        elif name == _FORMAT or text.setdefault(name, first) != first:  # the metadata uses it for something else
            stored[name] = tensor.contiguous().clone()
    if list(tensors) != sorted(tensors):
        text[_ORDER] = json.dumps(list(tensors))
    if (versions := getattr(tensors, "_metadata", None)) is not None:
        text[_VERSIONS] = json.dumps(versions)
        kind = "the state_dict's module metadata is not JSON; write a .pt file instead"
        check(json.loads(text[_VERSIONS]) == versions, kind)
    save_file(stored, path, metadata=text or None)


def _independent(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, each owning its storage: views of larger ones are copied out. Two names of one tensor (the same
    memory seen the same way) still are of one."""
    made: dict[object, Any] = {}
    storages: set[int] = set()
    for name, value in tensors.items():
        key = _identity(name, value)
        if key not in made and isinstance(value, Tensor):
            tensor = value.detach().resolve_conj().resolve_neg()
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
                    tensor = tensor.clone()
                storages.add(storage.data_ptr())
            made[key] = tensor
        made.setdefault(key, value)
    return {name: made[_identity(name, value)] for name, value in tensors.items()}


def _identity(name: str, tensor: Any) -> object:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return name
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
