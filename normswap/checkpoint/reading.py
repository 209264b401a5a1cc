"""A checkpoint as people have it: a file, a folder of shards with an index or of torch.distributed.checkpoint, or a
state_dict inside something larger."""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from normswap.checkpoint.errors import check, failing, listed, read_json
from normswap.checkpoint.files import is_plain, settle
from normswap.checkpoint.tensors import SUFFIXES, check_layouts, load_file

INDEX = ".index.json"
CONFIG = "config.json"
SETTINGS = (CONFIG, "generation_config.json")
METADATA = ".metadata"
TOP = "."
STANDARD = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", INDEX))
"""What transformers looks for in a folder, in its order."""

Place = tuple[str, ...]
"""The keys that lead to a state_dict inside what a file holds; none where it is that itself."""


@dataclass(frozen=True)
class Checkpoint:
    """A state_dict and where it came from: ``main`` is the file or the index, ``files`` are those with the tensors
    (none in memory), ``key`` is where in the file it was, ``prefixes`` what was stripped from its names,
    ``others`` what else there is, ``notes`` what a person should be told, ``module`` the pickled model itself. A model
    built on the meta device gets these tensors or, where not ``shared``, copies."""

    main: Path
    files: tuple[Path, ...]
    state: OrderedDict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    key: str = TOP
    prefixes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None
    shared: bool = True

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors alone."""
        return {name: value for name, value in self.state.items() if isinstance(value, Tensor)}


def open_checkpoint(
    path: str | Path, *, key: str | None = None, strip_prefix: Sequence[str] = (), allow_pickle: bool = False
) -> Checkpoint:
    """Find, check and read the checkpoint at ``path``: a file, an index, or a folder that holds one.

    ``key`` names a state_dict inside the file ("model", "a.b", "." for the file itself); without it the only one is
    taken. Each of ``strip_prefix`` is removed, in order, from the names that begin with it. Raises CheckpointError."""
    path = Path(path)
    with failing(f"{path}: cannot be read", (OSError, ValueError)):
        folder = path if path.is_dir() else path.parent
        for manifest in (folder / "normswap.json", path.parent / f"{path.name}.normswap.json"):
            settle(manifest)
        main = _main_file(path) if path.is_dir() else path
    if main.name.endswith(INDEX):
        check(key in (None, TOP), f"{main}: no state_dict under the key {key!r}; there is {TOP}")
        found = _open_shards(main, allow_pickle)
    elif main.name == METADATA:
        distributed = importlib.import_module("normswap.checkpoint.distributed")  # not every build of PyTorch has it
        files = (main, *sorted(folder.glob("*.distcp")))
        found = replace(select(main, distributed.read_distributed(main), key), files=files)
    else:
        loaded, metadata = load_file(main, allow_pickle=allow_pickle)
        found = replace(select(main, loaded, key), metadata=metadata)
    check_layouts(main, found.tensors)
    return _stripped(found, strip_prefix) if strip_prefix else found


def _main_file(folder: Path) -> Path:
    """The index or the only tensors file of a folder. Raises CheckpointError when there is none, or several."""
    names = sorted(os.listdir(folder))
    seen = [name for name in names if not name.startswith(".")]
    found = [name for name in (METADATA, *STANDARD) if (folder / name).is_file()][:1]
    found = found or [name for name in seen if name.endswith(INDEX)] or [n for n in seen if Path(n).suffix in SUFFIXES]
    parts = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    pipeline = len(found) != 1 and "model_index.json" in names
    check(not pipeline, f"{folder}: a pipeline of several models; name the folder of one: {listed(parts)}")
    check(found, f"{folder}: a folder without a checkpoint (no {', '.join(SUFFIXES)} file)")
    check(len(found) == 1, f"{folder}: holds {len(found)} checkpoints ({listed(found)}); name one of them")
    return folder / found[0]


def _open_shards(index: Path, allow_pickle: bool) -> Checkpoint:
    """The checkpoint of which ``index`` says where each tensor lies. Raises CheckpointError unless every shard is the
    plain name of a file of one format, with those tensors and no others."""
    data = read_json(index)
    placed: Any = data.get("weight_map") if isinstance(data, dict) else None
    check(isinstance(placed, dict) and placed, f"{index}: has no weight_map from tensors to shards")
    shards = list(dict.fromkeys(map(str, placed.values())))
    for shard in shards:
        sound = is_plain(shard) and Path(shard).suffix in SUFFIXES
        check(sound, f"{index}: shard {shard!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    check(len({Path(shard).suffix for shard in shards}) == 1, f"{index}: its shards are files of several formats")
    state: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    others: tuple[str, ...] = ()
    files = tuple(index.parent / shard for shard in shards)
    for file in files:
        loaded, text = load_file(file, allow_pickle=allow_pickle)
        there = select(file, loaded, TOP)
        found, others = there.state, (*others, *there.others)
        wrong = sorted({name for name, shard in placed.items() if shard == file.name} ^ found.keys())
        check(not wrong, f"{file}: lacks, or holds and the index does not place there, {listed(wrong)}")
        state.update(found)
        metadata.update(text)
    return Checkpoint(index, files, OrderedDict((name, state[name]) for name in placed), metadata, others=others)


def select(path: Path, loaded: Any, key: str | None = None) -> Checkpoint:
    """The state_dict under ``key`` in what a file holds, or the only one there is: a dict of tensors by name (and extra
    state) or a pickled module; if none is inside, the file's own tensors. Raises CheckpointError."""
    candidates = dict(_inside(loaded, (), 3, set()))
    if _has_tensors(loaded) and (not candidates or key == TOP):
        candidates[()] = loaded
    check(candidates, f"{path}: not a state_dict (names to tensors) but {_what(loaded)}")
    places = [at for at in candidates if key is None or _dotted(at) == key]
    check(places, f"{path}: no state_dict under the key {key!r}; there is {listed([*map(_dotted, candidates)])}")
    key = _dotted(places[0])
    names = ", ".join(f"{_dotted(at)} ({_what(candidates[at])})" for at in places)
    several = f"{path}: holds {len(places)} state_dicts: {names}"
    check(all(_dotted(at) == key for at in places), f"{several}; name one with key (--key)")
    alike = "their keys are written alike; save the one that is meant to a file of its own"
    check(len(places) == 1, f"{several}; {alike}")
    chosen = candidates[places[0]]
    module = chosen if isinstance(chosen, nn.Module) else None
    given = chosen if module is None else module.state_dict()
    state = OrderedDict((name, entry) for name, entry in given.items() if _belongs(name, entry))
    if (versions := getattr(given, "_metadata", None)) is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    others = tuple(f"{_dotted(at)} ({_what(value)})" for at, value in _beside(loaded, places[0], state))
    what = "its own tensors" if key == TOP else f"its {key!r}"
    notes = (f"{path}: took {what}; it also holds {listed(others) or 'nothing else'}",) if others or key != TOP else ()
    return Checkpoint(path, (path,), state, key=key, others=others, notes=notes, module=module)


def _stripped(found: Checkpoint, prefixes: Sequence[str]) -> Checkpoint:
    """``found`` with each prefix, in order, removed from the names (and module versions) that begin with it."""
    for prefix in prefixes:
        first, count = next(iter(found.state)), len(found.state)
        used = any(name.startswith(prefix) for name in found.state)
        check(used, f"{found.main}: no name begins with the prefix {prefix!r}; the first is {first!r}")
        consume_prefix_in_state_dict_if_present(found.state, prefix)
        check(len(found.state) == count, f"{found.main}: without the prefix {prefix!r} two tensors have one name")
    note = f"{found.main}: stripped {', '.join(map(repr, prefixes))} from the names of its tensors"
    return replace(found, prefixes=tuple(prefixes), notes=(*found.notes, note))


def _beside(value: Any, at: Place, state: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """What ``value`` holds, at every level, beside what of it leads to ``at`` and, there, besides ``state``."""
    for depth, key in enumerate(at):
        yield from (((*at[:depth], name), inner) for name, inner in value.items() if name != key)
        value = value[key]
    if isinstance(value, Mapping):
        yield from (((*at, name), inner) for name, inner in value.items() if name not in state)


def _dotted(at: Place) -> str:
    """The key of a place, as a person writes it."""
    return ".".join(at) if at else TOP


def _inside(value: Any, at: Place, depth: int, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    """The state_dicts in ``value``, which is at ``at``, by their places; what holds none is looked into once."""
    if id(value) in seen:
        return
    if isinstance(value, nn.Module) or (_has_tensors(value) and all(_belongs(n, entry) for n, entry in value.items())):
        yield at, value
    elif isinstance(value, Mapping) and depth and all(isinstance(k, str) for k in value):
        seen.add(id(value))
        for key, inner in value.items():
            yield from _inside(inner, (*at, key), depth - 1, seen)


def _has_tensors(value: Any) -> bool:
    named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return named and any(isinstance(entry, Tensor) for entry in value.values())


def _belongs(name: str, entry: object) -> bool:
    return isinstance(entry, Tensor) or name.endswith("_extra_state")


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Mapping) else type(value).__name__
