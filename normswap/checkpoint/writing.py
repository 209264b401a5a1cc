"""Where a converted checkpoint goes, and how all its files get there together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch

from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.factory import HERE
from normswap.checkpoint.files import copy_file, replacing, sha256
from normswap.checkpoint.manifest import MANIFEST, Manifest, manifest_of
from normswap.checkpoint.reading import INDEX, SETTINGS, Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import SUFFIXES, same_format, same_tensors, tensor_writer

Progress = Callable[[str, int, int], object]
"""Called with what is being done, the bytes done, and the bytes to do."""

_STANDARD = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX))
_FOREIGN = (".onnx", ".pt2", ".gguf", ".ggml", ".h5", ".npz", ".npy", ".pkl", ".tflite", ".engine", ".msgpack")

_LEFT = (
    *(".*", "*/.*", "original/*", "onnx/*", "openvino/*", "coreml/*", "runs/*", "global_step*/*", "checkpoint-*/*"),
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "training_args.bin", "*.tmp", f"*{MANIFEST}"),
    *("*.onnx", "*.gguf", "*.msgpack", "*.h5", "*.ot", "*.tflite"),
)
"""What is not taken over from a folder, as the libraries' own downloads leave it: neither weights nor settings."""


@dataclass(frozen=True)
class Target:
    """What is to be written: ``main`` (file or index) and what is copied there from ``sources``, by path.

    ``copied`` is False where the tensors are written anew in another format, ``in_place`` True where only the
    manifest is written.
    """

    main: Path
    manifest: Path
    sources: Mapping[Path, Path]
    copied: bool = True
    in_place: bool = False


def place(source: Path, found: Checkpoint, out: Path | None, force: bool) -> Target:
    """What ``out`` stands for: a file if it has a suffix of SUFFIXES, else a folder; None for a manifest alone, beside
    the checkpoint itself.

    A folder takes the other files of the folder ``source``, too. Raises CheckpointError when ``out`` cannot be, or is
    there and not ``force``.
    """
    try:
        if out is None:
            target = Target(found.main, manifest_of(source), {}, in_place=True)
            check_new([target.manifest], force)
            return target
        return _placed(source, found, out, force)
    except OSError as error:
        raise CheckpointError(f"{out or found.folder}: cannot be written ({one_line(error)})") from error


def check_out(out: Path) -> bool:
    """Whether ``out`` is to be a file. Raises CheckpointError when it cannot be, nor a folder."""
    try:
        is_folder, is_there = out.is_dir(), os.path.lexists(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({one_line(error)})") from error
    if out.suffix in SUFFIXES and not is_folder:
        return True
    if out.suffix in _FOREIGN and not is_folder:
        raise CheckpointError(
            f"{out}: suffix {out.suffix!r} is not one of {', '.join(SUFFIXES)} (a folder of that name must exist first)"
        )
    if is_there and not is_folder:
        raise CheckpointError(
            f"{out}: exists and is not a folder; name a folder, or a file ending in {', '.join(SUFFIXES)}"
        )
    return False


def check_new(paths: Sequence[Path], force: bool) -> None:
    """Raise CheckpointError when one of the files is there and not ``force``, or is a folder."""
    for path in paths:
        if path.is_dir():
            raise CheckpointError(f"{path}: is a folder")
        if os.path.lexists(path) and not force:
            raise CheckpointError(f"{path}: exists already; pass force (--force) to replace it")


def check_extra(path: Path, suffix: str, found: Checkpoint, target: Target, force: bool) -> Path:
    """``path``, one more file to write. Raises CheckpointError when it cannot be: it obeys the rules of OUT, and is no
    file of the checkpoint read or written."""
    if suffix and path.suffix != suffix:
        raise CheckpointError(f"{path}: a torch.export program is named {suffix}")
    taken = {os.path.realpath(p) for p in (*found.files, found.main, target.main, target.manifest, *target.sources)}
    if os.path.realpath(path) in taken:
        raise CheckpointError(f"{path}: is a file of the checkpoint")
    check_new([path], force)
    return path


def _placed(source: Path, found: Checkpoint, out: Path, force: bool) -> Target:
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise CheckpointError(f"{out}: lies inside {source}; choose a place outside it, or pass in_place (--in-place)")
    is_file = check_out(out)
    main = out if is_file else out / found.main.name
    manifest = manifest_of(out) if is_file or out.is_dir() else out / MANIFEST
    if main.exists() and main.samefile(found.main):
        target = Target(main, manifest, {}, in_place=True)
    elif is_file and (found.main.suffix not in SUFFIXES or not same_format(found.main, main)):
        target = Target(main, manifest, {}, copied=False)
    else:
        target = Target(main, manifest, _copies(source, found, main))
    check_new([target.main, *target.sources, target.manifest], force)
    if main.name in _STANDARD and not target.in_place:
        _check_rivals(target)
    return target


def _copies(source: Path, found: Checkpoint, main: Path) -> dict[Path, Path]:
    """The files to copy, in order: others, the tensors, the index."""
    folder = main.parent
    tensors = {folder / file.name: file for file in found.files if file != found.main}
    others = {folder / path.relative_to(source): path for path in other_files(source, found)} if source.is_dir() else {}
    return {**{to: path for to, path in others.items() if to not in tensors}, **tensors, main: found.main}


def other_files(source: Path, found: Checkpoint) -> list[Path]:
    """What belongs to the model in a folder besides its tensors: settings, words, code; no other weights."""
    return sorted(
        path
        for path in source.rglob("*")
        if path.is_file()
        and not any(fnmatch(str(path.relative_to(source)), pattern) for pattern in _LEFT)
        and not (path.parent == source and (path.suffix in SUFFIXES or path.name in _STANDARD))
    )


def _check_rivals(target: Target) -> None:
    """A folder in which another reader could take older tensors for the new ones is refused, also with force."""
    folder = target.main.parent
    rivals = [name for name in _STANDARD if folder / name not in (target.main, *target.sources)]
    if there := [name for name in rivals if os.path.lexists(folder / name)]:
        raise CheckpointError(
            f"{folder}: holds {listed(there)} too, which could be taken for the new checkpoint; remove it, or choose "
            "another folder"
        )


def write(
    found: Checkpoint,
    target: Target,
    manifest: Manifest,
    more: Mapping[Path, Callable[[Path], object]],
    progress: Progress | None = None,
) -> None:
    """Write all files of ``target``, those of ``more`` and, last, the manifest: all of them or none.

    What is written is read back, and must be equal. Raises CheckpointError.
    """
    vouched = _vouched_for(found, target, manifest)
    try:
        copying = _counter("writing", sum(path.stat().st_size for path in target.sources.values()), progress)
        with replacing() as files:
            for path, fill in more.items():
                files.write(path, fill)
            made = () if target.copied else (target.main,)
            if made:
                files.write(target.main, tensor_writer(target.main, found.state, found.metadata))
            for path, source in target.sources.items():
                files.write(path, partial(copy_file, source, progress=copying))
            staged = [files.staged(path) for path in vouched]
            hashing = _counter("hashing", sum(path.stat().st_size for path in staged), progress)
            with ThreadPoolExecutor(1) as pool:
                sums = [pool.submit(sha256, path, hashing) for path in staged]
                if not target.in_place:
                    _check_written(target, manifest, found, files.staged)
            folder = target.manifest.parent
            kept = replace(
                manifest,
                files={
                    str(path.relative_to(folder)): digest.result() for path, digest in zip(vouched, sums, strict=True)
                },
                token=files.token,
                written=tuple(str(path.relative_to(folder)) for path in (target.sources or made)),
            )
            files.write(target.manifest, lambda path: path.write_text(kept.to_json(), encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{target.main}: cannot be written ({one_line(error)})") from error


def _counter(what: str, total: int, progress: Progress | None) -> Callable[[int], object]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(what, done, total)

    return count


def _vouched_for(found: Checkpoint, target: Target, manifest: Manifest) -> list[Path]:
    """The files of which the manifest keeps a digest: all that ``load_model`` reads."""
    folder = target.main.parent
    shards = [folder / file.name for file in found.files if file != found.main] if target.copied else []
    settings = [folder / name for name in SETTINGS if (found.folder / name).is_file()]
    return [target.main, *shards, *(settings if manifest.factory == HERE else ())]


def _check_written(target: Target, manifest: Manifest, found: Checkpoint, at: Callable[[Path], Path]) -> None:
    if target.copied:
        same = all(_same_bytes(source, at(path)) for path, source in target.sources.items())
    else:
        back = open_checkpoint(target.main, key=manifest.key, strip_prefix=manifest.strip_prefix, at=at)
        same = same_tensors(back.state, found.state)
    if not same:
        raise CheckpointError(
            f"{target.main}: what was written does not read back equal to {found.main}; nothing is kept"
        )


def _same_bytes(one: Path, other: Path) -> bool:
    size = one.stat().st_size
    if size != other.stat().st_size or not size:
        return size == other.stat().st_size
    first, second = (torch.from_file(str(path), size=size, dtype=torch.uint8) for path in (one, other))
    return torch.equal(first, second)
