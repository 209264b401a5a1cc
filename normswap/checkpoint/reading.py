"""A checkpoint as people have it: a file, a folder of shards with an index or of torch.distributed.checkpoint, or a
state_dict inside something larger."""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from normswap.checkpoint.errors import CheckpointError, listed, one_line, read_json
from normswap.checkpoint.files import is_plain, settle
from normswap.checkpoint.layouts import check_layouts
from normswap.checkpoint.nested import TOP, Selection, select, strip
from normswap.checkpoint.tensors import SUFFIXES, load_file

INDEX = ".index.json"
CONFIG = "config.json"
SETTINGS = (CONFIG, "generation_config.json")
METADATA = ".metadata"
_NAMES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict and where it came from.

    ``state`` has the tensors in the file's order (and what modules keep as extra state), ``main`` is the file or the
    index, ``files`` are those with the tensors. ``key`` is where in the file the state_dict was ("." for the file
    itself), ``prefixes`` what was stripped from its names, ``others`` what else the file holds, ``notes`` what a
    person should be told. ``module`` is the pickled model itself, where the file holds one and pickles are allowed.
    """

    main: Path
    files: tuple[Path, ...]
    state: OrderedDict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    key: str = TOP
    prefixes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None

    @property
    def folder(self) -> Path:
        """The folder in which the checkpoint lies."""
        return self.main.parent

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors alone."""
        return {name: value for name, value in self.state.items() if isinstance(value, Tensor)}


def open_checkpoint(
    path: str | Path,
    *,
    key: str | None = None,
    strip_prefix: Sequence[str] = (),
    allow_pickle: bool = False,
    at: Callable[[Path], Path] = lambda path: path,
) -> Checkpoint:
    """Find, check and read the checkpoint at ``path``: a file, an index, or a folder that holds one.

    ``key`` names a state_dict inside the file ("model", "a.b", "." for the file itself); without it the only one is
    taken. Each of ``strip_prefix`` is removed, in order, from the names that begin with it. Tensors are memory-mapped
    where the format allows; ``at`` tells where a file lies until it is renamed.

    Raises CheckpointError for a missing, truncated, foreign or unsafe file, and when it is not clear what to take.
    """
    path = Path(path)
    try:
        folder = path if path.is_dir() else path.parent
        for manifest in (folder / "normswap.json", path.with_name(f"{path.name}.normswap.json")):
            settle(manifest)
        main = find_checkpoint(path) if path.is_dir() else path
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error
    if main.name.endswith(INDEX):
        found = _open_shards(main, allow_pickle, at)
    else:
        files: tuple[Path, ...] = (main,)
        metadata: dict[str, str] = {}
        if main.name == METADATA:
            files, loaded = (main, *sorted(folder.glob("*.distcp"))), distributed().read_distributed(at(main))
        else:
            suffix = main.suffix if at(main) != main else None
            loaded, metadata = load_file(at(main), suffix=suffix, allow_pickle=allow_pickle)
        chosen = select(main, loaded, key)
        notes = _note_choice(main, chosen)
        found = Checkpoint(
            main, files, chosen.state, metadata, chosen.key, others=chosen.others, notes=notes, module=chosen.module
        )
    check_layouts(main, found.tensors)
    found = replace(found, notes=(*_choice_notes(path, main), *found.notes))
    return _stripped(found, strip_prefix) if strip_prefix else found


def find_checkpoint(folder: Path) -> Path:
    """The index or the only tensors file of a folder. Raises CheckpointError when there is none, or several."""
    for name in (METADATA, *_NAMES):
        for candidate in (folder / name, folder / f"{name}{INDEX}"):
            if candidate.is_file():
                return candidate
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if Path(name).suffix in SUFFIXES and not name.startswith(".")]
    found = indices or files
    if len(found) == 1:
        return folder / found[0]
    if (folder / "model_index.json").is_file():
        parts = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        raise CheckpointError(f"{folder}: a pipeline of several models; name the folder of one: {listed(parts)}")
    if not found:
        raise CheckpointError(f"{folder}: a folder without a checkpoint (no {', '.join(SUFFIXES)} file)")
    raise CheckpointError(f"{folder}: holds {len(found)} checkpoints ({listed(found)}); name one of them")


def distributed() -> ModuleType:
    """What reads and writes the folders of torch.distributed.checkpoint, which not every build of PyTorch has."""
    return importlib.import_module("normswap.checkpoint.distributed")


def is_checkpoint_name(name: str) -> bool:
    """Whether a file of this name can hold tensors, or say where they are."""
    return name == METADATA or name.endswith(INDEX) or Path(name).suffix in SUFFIXES


def is_config_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder as transformers writes it."""
    return (Path(path) / CONFIG).is_file()


def _choice_notes(path: Path, main: Path) -> Iterator[str]:
    if path == main or (main.suffix != ".safetensors" and not main.name.startswith(_NAMES[0])):
        return
    other = [p.name for p in (path / _NAMES[1], path / f"{_NAMES[1]}{INDEX}") if p.is_file()]
    if other:
        yield f"{path}: read from {main.name}; {other[0]} is there too and was not looked at"


# --- shards -------------------------------------------------------------------------------------------------------


def _open_shards(index: Path, allow_pickle: bool, at: Callable[[Path], Path]) -> Checkpoint:
    placed = weight_map(index, at)
    names = tuple(dict.fromkeys(placed.values()))
    state: OrderedDict[str, Any] = OrderedDict()
    metadata: dict[str, str] = {}
    for shard in names:
        file = index.parent / shard
        loaded, text = load_file(at(file), suffix=file.suffix, allow_pickle=allow_pickle)
        found = select(file, loaded, TOP).state
        _check_shard(file, found, [name for name, where in placed.items() if where == shard])
        state.update(found)
        metadata.update(text)
    ordered = OrderedDict((name, state[name]) for name in placed)
    return Checkpoint(index, tuple(index.parent / name for name in names), ordered, metadata)


def weight_map(index: Path, at: Callable[[Path], Path]) -> dict[str, str]:
    """Which shard an index says each tensor lies in.

    Raises CheckpointError unless every shard is the plain name of a file of one format.
    """
    data = read_json(at(index))
    placed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: has no weight_map from tensors to shards")
    for shard in placed.values():
        if not is_plain(shard) or Path(shard).suffix not in SUFFIXES:
            raise CheckpointError(f"{index}: shard {shard!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    if len({Path(shard).suffix for shard in placed.values()}) > 1:
        raise CheckpointError(f"{index}: its shards are files of several formats")
    return placed


def _check_shard(file: Path, found: Mapping[str, Any], expected: list[str]) -> None:
    for what, names in (
        ("lacks", [name for name in expected if name not in found]),
        ("holds, and the index does not place there,", [name for name in found if name not in set(expected)]),
    ):
        if names:
            raise CheckpointError(f"{file}: {what} {listed(names)}")


def _note_choice(path: Path, chosen: Selection) -> tuple[str, ...]:
    if not chosen.others and chosen.key == TOP:
        return ()
    what = "its own tensors" if chosen.key == TOP else f"its {chosen.key!r}"
    return (f"{path}: took {what}; it also holds {listed(list(chosen.others)) or 'nothing else'}",)


def _stripped(found: Checkpoint, prefixes: Sequence[str]) -> Checkpoint:
    state = strip(found.main, found.state, prefixes)
    note = f"{found.main}: stripped {', '.join(map(repr, prefixes))} from the names of its tensors"
    return replace(found, state=state, prefixes=tuple(prefixes), notes=(*found.notes, note))
