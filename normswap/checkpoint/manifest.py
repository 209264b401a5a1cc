"""``normswap.json``: what a converted checkpoint is, how it was proved, and the digest of every file of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normswap.checkpoint.errors import CheckpointError, one_line, read_json
from normswap.checkpoint.files import is_inside, is_plain, settle
from normswap.checkpoint.reading import is_checkpoint_name
from normswap.checkpoint.tensors import SUFFIXES
from normswap.plan import Plan, PlanError

MANIFEST = "normswap.json"
FORMAT = 3


@dataclass(frozen=True)
class Manifest:
    """The content of ``normswap.json`` in a folder, or of ``net.pt.normswap.json`` beside a file.

    ``tensors`` is the name of the file, or of the index, that it speaks of; ``factory`` and ``kwargs`` build the model
    ("" where nothing does), ``key`` and ``strip_prefix`` find its state_dict, ``dtype`` is the one it was proved in
    where that is not the file's; ``files`` has the SHA-256 of every file that ``load_model`` reads; ``folded`` says
    whether the model was folded; ``token`` and ``written`` let a write that was killed be finished; ``proof`` is for
    people: versions, device, report.
    """

    tensors: str
    factory: str
    plan: Plan
    files: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    strip_prefix: tuple[str, ...] = ()
    dtype: str | None = None
    folded: bool = False
    token: str = ""
    written: tuple[str, ...] = ()
    proof: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest as text, which ``read_manifest`` reads back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({"format": FORMAT, **data, "plan": json.loads(self.plan.to_json())}, indent=2) + "\n"


def manifest_of(path: Path) -> Path:
    """Where the manifest of a folder or file is: in the folder, beside the file, or in the folder of the file if that
    one speaks of it. Raises CheckpointError."""
    try:
        if path.is_dir():
            return path / MANIFEST
        beside, shared = path.with_name(f"{path.name}.{MANIFEST}"), path.parent / MANIFEST
        if not beside.is_file() and shared.is_file() and _names(shared) == path.name:
            return shared
        return beside
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error


def _names(manifest: Path) -> object:
    data = read_json(manifest)
    return data.get("tensors") if isinstance(data, dict) else None


def is_converted(path: Path) -> bool:
    """Whether there is a manifest that speaks of ``path``, folder or file. Raises CheckpointError."""
    return manifest_of(path).is_file()


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The manifest of a converted checkpoint, folder or file, and where it is. What a killed process left to be renamed
    is renamed first. Raises CheckpointError."""
    place = manifest_of(path)
    found = read_manifest(place)
    try:
        settle(place)
    except OSError as error:
        raise CheckpointError(f"{place}: what was written with it cannot be renamed ({one_line(error)})") from error
    return place, found


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises CheckpointError for anything but one of this version."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; normswap convert writes it beside the tensors")
    data = read_json(path)
    if not isinstance(data, dict) or "format" not in data:
        raise CheckpointError(f"{path}: not written by normswap convert")
    if data["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {data['format']!r} is not {FORMAT}; convert again with this version")
    for key, check in _CHECKS.items():
        if not check(data.get(key)):
            raise CheckpointError(f"{path}: has no {key}, or not one of its kind; convert again")
    name = data["tensors"]
    if not is_plain(name) or not is_checkpoint_name(name):
        raise CheckpointError(f"{path}: tensors {name!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    try:
        plan = Plan.from_json(json.dumps(data["plan"]))
    except PlanError as error:
        raise CheckpointError(f"{path}: {error}") from error
    known = {f.name for f in dataclasses.fields(Manifest)}
    kept: dict[str, Any] = {key: value for key, value in data.items() if key in known}
    lists = {key: tuple(value) for key, value in kept.items() if isinstance(value, list)}
    return Manifest(**{**kept, **lists, "plan": plan})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_files(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_plain(name) and re.fullmatch("[0-9a-f]{64}", str(digest)) for name, digest in value.items()
    )


def _is_dtype(value: object) -> bool:
    return value is None or (_is_text(value) and isinstance(getattr(torch, str(value), None), torch.dtype))


_CHECKS = {
    "tensors": _is_text,
    "factory": _is_text,
    "plan": lambda value: isinstance(value, dict),
    "files": _is_files,
    "kwargs": lambda value: isinstance(value, dict),
    "key": lambda value: value is None or _is_text(value),
    "strip_prefix": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "dtype": _is_dtype,
    "folded": lambda value: isinstance(value, bool),
    "token": _is_text,
    "written": lambda value: isinstance(value, list) and all(map(is_inside, value)),
    "proof": lambda value: isinstance(value, dict),
}
