"""Where a converted checkpoint goes, and how all its files get there together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from normswap.checkpoint.digests import difference, digests
from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.factory import HERE
from normswap.checkpoint.files import JOURNAL, replacing, settle, sha256
from normswap.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from normswap.checkpoint.reading import CONFIG, INDEX, Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import SUFFIXES, same_format, tensor_writer

Progress = Callable[[str, int, int], object]
"""Called with what is being done, the bytes done, and the bytes to do."""

_STANDARD = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX))


@dataclass(frozen=True)
class Target:
    """What is to be written: ``main`` (file or index) and what is copied there from ``sources``, by path.

    ``copied`` is False where the tensors are written anew in another format, ``in_place`` True where only the
    manifest is written.
    """

    main: Path
    sources: Mapping[Path, Path]
    copied: bool = True
    in_place: bool = False

    @property
    def manifest(self) -> Path:
        """Where the manifest goes."""
        return self.main.parent / MANIFEST


def place(source: Path, found: Checkpoint, out: Path | None, force: bool) -> Target:
    """What ``out`` stands for: a file if it has a suffix of SUFFIXES, else a folder; None for a manifest alone, beside
    the checkpoint itself.

    A folder takes the other files of the folder ``source``, too. Raises CheckpointError when ``out`` cannot be, or is
    there and not ``force``.
    """
    try:
        return _in_place(found, force) if out is None else _placed(source, found, out, force)
    except OSError as error:
        raise CheckpointError(f"{out or found.folder}: cannot be written ({one_line(error)})") from error


def _in_place(found: Checkpoint, force: bool) -> Target:
    target = Target(found.main, {}, in_place=True)
    _settled(target.manifest.parent)
    if os.path.lexists(target.manifest) and not force:
        raise CheckpointError(f"{target.manifest}: exists already; pass force (--force) to replace it")
    return target


def _placed(source: Path, found: Checkpoint, out: Path, force: bool) -> Target:
    if source.is_dir() and source.resolve() in out.resolve().parents:
        raise CheckpointError(f"{out}: lies inside {source}; choose a place outside it, or pass in_place (--in-place)")
    _settled(out if out.is_dir() else out.parent)
    main = _main(found, out)
    if main.exists() and main.samefile(found.main):
        target = Target(main, {}, in_place=True)
    elif _is_file(out) and (found.main.name.endswith(INDEX) or not same_format(found.main, main)):
        target = Target(main, {}, copied=False)
    else:
        target = Target(main, _copies(source, found, main))
    _check_free(target, force)
    return target


def _main(found: Checkpoint, out: Path) -> Path:
    if _is_file(out):
        return out
    if out.suffix and not out.is_dir():
        raise CheckpointError(
            f"{out}: suffix {out.suffix!r} is not one of {', '.join(SUFFIXES)} (a folder of that name must exist first)"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(
            f"{out}: exists and is not a folder; name a folder, or a file ending in {', '.join(SUFFIXES)}"
        )
    return out / found.main.name


def _is_file(out: Path) -> bool:
    return out.suffix in SUFFIXES and not out.is_dir()


def _copies(source: Path, found: Checkpoint, main: Path) -> dict[Path, Path]:
    """The files to copy, in order: others, the tensors, the index."""
    folder = main.parent
    tensors = {folder / file.name: file for file in found.files}
    if found.main not in found.files:
        tensors[main] = found.main
    else:
        tensors = {main: found.main}
    others = {folder / path.relative_to(source): path for path in _other_files(source)} if source.is_dir() else {}
    return {**{to: path for to, path in others.items() if to not in tensors}, **tensors}


def _other_files(source: Path) -> list[Path]:
    ours = (MANIFEST, JOURNAL)
    return sorted(
        path
        for path in source.rglob("*")
        if path.is_file() and path.name not in ours and not (path.name.startswith(".") and path.name.endswith(".tmp"))
    )


def _settled(folder: Path) -> None:
    if folder.is_dir():
        settle(folder)


def _check_free(target: Target, force: bool) -> None:
    if target.main.is_dir():
        raise CheckpointError(f"{target.main}: is a folder")
    if target.main.name in _STANDARD and not target.in_place:
        _check_rivals(target)
    if force:
        return
    for path in (target.main, *target.sources):
        if os.path.lexists(path):
            raise CheckpointError(f"{path}: exists already; pass force (--force) to replace it")
    if os.path.lexists(target.manifest) and not _speaks_of(target):
        raise CheckpointError(
            f"{target.manifest}: exists and describes another file; choose another folder, or pass force (--force)"
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


def _speaks_of(target: Target) -> bool:
    try:
        return read_manifest(target.manifest).tensors == target.main.name
    except CheckpointError:
        return False


def write(
    found: Checkpoint,
    target: Target,
    manifest: Manifest,
    more: Mapping[Path, Callable[[Path], object]],
    progress: Progress | None = None,
) -> None:
    """Write all files of ``target``, those of ``more`` and, last, the manifest: all of them or none.

    What is written is read back, and must have the manifest's digests. Raises CheckpointError.
    """
    done, total = 0, sum(path.stat().st_size for path in target.sources.values())
    try:
        with replacing() as files:
            for path, fill in more.items():
                files.write(path, fill)
            if not target.copied:
                files.write(target.main, tensor_writer(target.main, found.state, found.metadata))
            for path, source in target.sources.items():
                files.write(path, partial(shutil.copyfile, source))
                done += source.stat().st_size
                if progress is not None:
                    progress("copying", done, total)
            if not target.in_place:
                _check_written(target, manifest, found, files.staged)
            sums = {path.name: sha256(files.staged(path)) for path in _vouched_for(found, target, manifest)}
            text = replace(manifest, files=sums).to_json()
            files.write(target.manifest, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{target.main}: cannot be written ({one_line(error)})") from error


def _vouched_for(found: Checkpoint, target: Target, manifest: Manifest) -> list[Path]:
    """The files of which the manifest keeps a digest: all that ``load_model`` reads."""
    folder = target.main.parent
    shards = found.files if target.copied and found.main not in found.files else ()
    config = (folder / CONFIG,) if manifest.factory == HERE else ()
    return [target.main, *(folder / shard.name for shard in shards), *config]


def _check_written(target: Target, manifest: Manifest, found: Checkpoint, at: Callable[[Path], Path]) -> None:
    back = open_checkpoint(
        target.main,
        key=manifest.key,
        strip_prefix=manifest.strip_prefix,
        allow_pickle=found.module is not None,
        at=at,
    )
    if list(back.state) != list(found.state) or difference(manifest.digests, digests(back.state)):
        raise CheckpointError(
            f"{target.main}: what was written does not read back equal to {found.main}; nothing is kept"
        )
