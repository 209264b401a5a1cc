"""``normswap.json``, the manifest of a converted checkpoint; where one goes, and how its files get there together."""
# ruff: noqa: RUF009 (each field of the manifest says in a call what may stand there)

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from filecmp import cmp
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from normswap.checkpoint.errors import CheckpointError, check, failing, listed, read_json, running
from normswap.checkpoint.files import copy_file, digest, is_inside, is_plain, replacing, settle
from normswap.checkpoint.models import HERE
from normswap.checkpoint.reading import INDEX, METADATA, SETTINGS, STANDARD, Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import PICKLE_SUFFIXES, SUFFIXES, load_file, same_tensors, tensor_writer
from normswap.plans import Plan, PlanError
from normswap.progress import Bar, progress

MANIFEST = "normswap.json"
FORMAT = 4
DISTRIBUTED = ".dcp"
"""The end of the name of an OUT that shall be a folder of torch.distributed.checkpoint."""

_FOREIGN = (".onnx", ".pt2", ".gguf", ".ggml", ".h5", ".npz", ".npy", ".pkl", ".tflite", ".engine", ".msgpack")

_LEFT = (
    *(".*", "*/.*", "original/*", "onnx/*", "openvino/*", "coreml/*", "runs/*", "global_step*/*", "checkpoint-*/*"),
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "training_args.bin", "*.tmp", f"*{MANIFEST}"),
    *("*.onnx", "*.gguf", "*.msgpack", "*.h5", "*.ot", "*.tflite"),
)
"""What is not taken over from a folder, as the libraries' own downloads leave it: neither weights nor settings."""


def _checked(kind: Any, *default: Any, sound: Callable[[Any], object] = lambda value: True) -> Any:
    """A field that, as JSON, must be of ``kind`` and ``sound``."""
    given: dict[str, Any] = {"default_factory": lambda: default[0]} if default else {}
    return field(metadata={"sound": lambda value: isinstance(value, kind) and sound(value)}, **given)


def _are_digests(files: Mapping[Any, Any]) -> bool:
    return all(is_plain(name) and re.fullmatch("[0-9a-f]{64}", str(found)) for name, found in files.items())


def _is_dtype(name: str | None) -> bool:
    return name is None or isinstance(getattr(torch, name, None), torch.dtype)


@dataclass(frozen=True)
class Manifest:
    """The content of ``normswap.json`` in a folder, or of ``net.pt.normswap.json`` beside a file."""

    tensors: str = _checked(str)  # the name of the file, or of the index, that it speaks of
    factory: str = _checked(str)  # builds the model, with kwargs; "" where nothing does
    plan: Plan = _checked(dict)
    # The digest, by files.digest, of every file that load_model reads.
    files: Mapping[str, str] = _checked(dict, {}, sound=_are_digests)
    kwargs: Mapping[str, Any] = _checked(dict, {})
    key: str | None = _checked((str, type(None)), None)
    strip_prefix: tuple[str, ...] = _checked(list, (), sound=lambda names: all(isinstance(name, str) for name in names))
    dtype: str | None = _checked((str, type(None)), None, sound=_is_dtype)  # of the proof, where not the file's
    folded: bool = _checked(bool, False)
    token: str = _checked(str, "")  # this and the next let a write that was killed be finished
    written: tuple[str, ...] = _checked(list, (), sound=lambda names: all(map(is_inside, names)))
    proof: Mapping[str, Any] = _checked(dict, {})  # for people: versions, device, report

    def to_json(self) -> str:
        """The manifest as text, which ``find_manifest`` reads back."""
        return json.dumps({"format": FORMAT, **vars(self), "plan": self.plan.to_dict()}, indent=2) + "\n"


def manifest_of(path: Path) -> Path:
    """Where the manifest of a folder or file is: in the folder, beside the file, or in the folder of the file if that
    one speaks of it. Raises CheckpointError."""
    with failing(f"{path}: cannot be read", OSError):
        if path.is_dir():
            return path / MANIFEST
        beside, shared = path.with_name(f"{path.name}.{MANIFEST}"), path.parent / MANIFEST
        data = read_json(shared) if shared.is_file() and not beside.is_file() else None
        return shared if isinstance(data, dict) and data.get("tensors") == path.name else beside


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The manifest of a converted checkpoint, folder or file, and where it is; what a killed process left to be renamed
    is renamed. Raises CheckpointError."""
    place = manifest_of(path)
    check(place.is_file(), f"{place}: no such file; normswap convert writes it beside the tensors")
    data = read_json(place)
    check(isinstance(data, dict) and "format" in data, f"{place}: not written by normswap convert")
    known = data["format"] == FORMAT
    check(known, f"{place}: format {data['format']!r} is not {FORMAT}; convert again with this version")
    kept: dict[str, Any] = {}
    for part in fields(Manifest):
        value = data.get(part.name)
        check(part.metadata["sound"](value), f"{place}: has no {part.name}, or not one of its kind; convert again")
        kept[part.name] = tuple(value) if isinstance(value, list) else value
    name = data["tensors"]
    sound = is_plain(name) and (name == METADATA or name.endswith(INDEX) or Path(name).suffix in SUFFIXES)
    check(sound, f"{place}: tensors {name!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    with failing(f"{place}: what was written with it cannot be renamed", (OSError, ValueError)):
        settle(place)
    try:
        plan = Plan.from_json(json.dumps(data["plan"]))
    except PlanError as error:
        raise CheckpointError(f"{place}: {error}") from error
    return place, Manifest(**{**kept, "plan": plan})


@dataclass(frozen=True)
class Target:
    """What is to be written: ``main``, the file or index, ``manifest``, and in ``sources`` all files but this, each
    with the one that it is a copy of, or None for tensors that are written anew. In place there are none."""

    main: Path
    manifest: Path
    sources: Mapping[Path, Path | None]

    @property
    def anew(self) -> bool:
        """Whether the tensors are written in another format, or are others."""
        return None in self.sources.values()


def place(source: Path, found: Checkpoint, out: Path | None, force: bool, *, anew: bool = False) -> Target:
    """What ``out`` stands for: a file if it has a suffix of SUFFIXES, else a folder, which takes the other files of the
    folder ``source``, too; None for a manifest alone. The tensors are written ``anew``, into one file, where that is
    asked for or the format is another. Raises CheckpointError when it cannot be, or is there and not ``force``."""
    with failing(f"{out or source}: cannot be written", OSError):
        target = Target(found.main, manifest_of(source), {}) if out is None else _placed(source, found, out, anew)
        for path in (*(() if out is None else (target.main,)), *target.sources, target.manifest):
            check_new(path, force)
        for path in (target.main, *map(target.main.with_name, (file.name for file in found.files if not target.anew))):
            rule = "a name must not be hidden, must be UTF-8 without a backslash, and have at most 200 bytes"
            check(is_plain(path.name), f"{path}: could not be opened: {rule}")
        rivals = [target.main.with_name(n) for n in STANDARD if target.main.name in STANDARD and target.sources]
        there = [path.name for path in rivals if path not in target.sources and os.path.lexists(path)]
        taken = f"holds {listed(there)} too, which could be taken for the new checkpoint"  # also with force
        check(not there, f"{target.main.parent}: {taken}; remove it, or choose another folder")
        return target


def reachable(path: str | Path) -> Path:
    """``path``. Raises CheckpointError where it goes up from a folder that is not there: what is written would not be
    found by that name."""
    path = Path(path)
    for end, part in enumerate(path.parts):
        folder = Path(*path.parts[:end])
        known = part != ".." or os.path.isdir(folder)
        check(known, f"{path}: passes through {folder}, where no folder is; make it, or name a path without it")
    return path


def _placed(source: Path, found: Checkpoint, out: Path, anew: bool) -> Target:
    outside = not source.is_dir() or source.resolve() not in out.resolve().parents
    check(outside, f"{out}: lies inside {source}; choose a place outside it, or pass in_place (--in-place)")
    is_file = _is_file_name(out)
    main = out if is_file else out / found.main.name
    manifest = manifest_of(out) if is_file or out.is_dir() else out / MANIFEST
    other_format = (found.main.suffix in PICKLE_SUFFIXES) != (main.suffix in PICKLE_SUFFIXES)
    if anew or (is_file and (found.main.suffix not in SUFFIXES or other_format)):
        check(main.suffix in SUFFIXES, f"{main}: is written as one file; name one ending in {', '.join(SUFFIXES)}")
        return Target(main, manifest, {main: None})
    if main.exists() and main.samefile(found.main):
        return Target(main, manifest, {})
    others = [path for path in sorted(source.rglob("*")) if _belongs(path, source)] if source.is_dir() else []
    tensors = {main.with_name(file.name): file for file in found.files if file != found.main}
    return Target(main, manifest, {out / p.relative_to(source): p for p in others} | tensors | {main: found.main})


def _belongs(path: Path, source: Path) -> bool:
    """Whether ``path`` belongs to the model in a folder, but is none of its tensors: settings, words, code."""
    weights = path.parent == source and (path.suffix in SUFFIXES or path.name in STANDARD)
    left = any(fnmatch(str(path.relative_to(source)), pattern) for pattern in _LEFT)
    return path.is_file() and not weights and not left


def _is_file_name(out: Path) -> bool:
    """Whether ``out`` is to be a file. Raises CheckpointError when it cannot be, nor a folder; OSError."""
    if out.is_dir() or out.suffix in SUFFIXES:
        return not out.is_dir()
    suffixes, kind = ", ".join(SUFFIXES), f"suffix {out.suffix!r}"
    cure = "a folder of that name must exist first"
    check(out.suffix not in _FOREIGN, f"{out}: {kind} is not one of {suffixes} ({cure})")
    check(not os.path.lexists(out), f"{out}: exists and is not a folder; name a folder, or a file of {suffixes}")
    return False


def check_new(path: Path, force: bool, taken: Iterable[Path] = ()) -> None:
    """Raise CheckpointError when the file is there and not ``force``, is a folder, or one of ``taken``."""
    check(os.path.realpath(path) not in map(os.path.realpath, taken), f"{path}: is a file of the checkpoint")
    check(not path.is_dir(), f"{path}: is a folder")
    check(force or not os.path.lexists(path), f"{path}: exists already; pass force (--force) to replace it")


def check_holds(out: Path, found: Checkpoint) -> None:
    """Raises CheckpointError where ``found`` has more than tensors, which ``out``, of another format, cannot hold."""
    besides = f"cannot hold what {found.main} has besides tensors: {listed(found.others)}"
    suffix = found.main.suffix
    cure = f"name a file that ends in {suffix}" if suffix in PICKLE_SUFFIXES else "name a folder"
    check(not found.others, f"{out}: {besides}; {cure}")


@contextmanager
def as_folder(
    source: Path, found: Checkpoint, out: Path | None, own: Callable[[Path], object] | None = None
) -> Iterator[tuple[Path, Checkpoint]]:
    """``source`` and what was found there; or, until the block ends, a folder beside ``out`` and what ``own``, the
    model's save_pretrained, writes there, or torch.distributed.checkpoint where ``out`` is to be one of its folders."""
    fill = own
    if own is None and out is not None and out.suffix == DISTRIBUTED and found.main.name != METADATA:
        check_holds(out, found)
        distributed = importlib.import_module("normswap.checkpoint.distributed")  # not every build of PyTorch has it
        fill = partial(distributed.write_distributed, state=found.state, out=out)
    if fill is None or out is None:
        yield source, found
        return
    with failing(f"{out}: cannot be written", OSError):
        beside = next(folder for folder in out.absolute().parents if folder.is_dir())
        made = TemporaryDirectory(prefix=".normswap-", suffix=".tmp", dir=beside)
    with made as name:
        with running(f"{out}: what writes it"):
            fill(Path(name))
        yield Path(name), open_checkpoint(name)


def write(found: Checkpoint, target: Target, manifest: Manifest, more: Mapping[Path, bytes], force: bool) -> None:
    """Write all files of ``target``, those of ``more`` and, last, the manifest: all of them or none, and over what is
    there by then only with ``force``. What is written is read back, and must be equal. Raises CheckpointError."""
    folder, fills = target.manifest.parent, dict[Path, Callable[[Path], object]]()
    with failing(f"{target.main}: cannot be written", OSError), replacing(force) as files:
        fills.update((path, partial(Path.write_bytes, data=content)) for path, content in more.items())
        with _bar("writing", filter(None, target.sources.values())) as written:
            copy = partial(copy_file, progress=written.update)
            for path, source in target.sources.items():
                anew = source is None
                fills[path] = tensor_writer(path, found.state, found.metadata) if anew else partial(copy, source)
            at = {path: files.write(path, fill) for path, fill in fills.items()}
        names = [] if target.anew else [file.name for file in found.files if file != found.main]
        if manifest.factory == HERE:
            names += [name for name in SETTINGS if (found.main.parent / name).is_file()]
        read = {path: at.get(path, path) for path in (target.main, *map(target.main.with_name, names))}
        with _bar("hashing", read.values()) as hashed, ThreadPoolExecutor(1) as pool:
            sums = pool.map(partial(digest, progress=hashed.update), read.values())
            for path, source in target.sources.items():
                there = at[path]
                same = cmp(source, there, False) if source else same_tensors(load_file(path, at=there)[0], found.state)
                other = f"what was written does not read back equal to {found.main}; nothing is kept"
                check(same, f"{target.main}: {other}")
            digests = {str(path.relative_to(folder)): made for path, made in zip(read, sums, strict=True)}
        names = [str(path.relative_to(folder)) for path in target.sources]
        last = replace(manifest, files=digests, token=files.token, written=tuple(names))
        files.write(target.manifest, partial(Path.write_text, data=last.to_json(), encoding="utf-8"))


def _bar(what: str, files: Iterable[Path]) -> Bar:
    return progress(what, unit="B", total=sum(path.stat().st_size for path in files))
