"""``normswap.json``: what a converted checkpoint is, how it was proved, and the digest of every tensor."""

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
from normswap.checkpoint.files import is_plain, present
from normswap.checkpoint.reading import INDEX
from normswap.checkpoint.tensors import SUFFIXES
from normswap.plan import Plan, PlanError

MANIFEST = "normswap.json"
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """The content of ``normswap.json``.

    ``tensors`` is the plain name of the file, or of the index, that it speaks of; ``factory`` and ``kwargs`` build the
    model, ``key`` and ``strip_prefix`` find its state_dict, ``dtype`` is the one it was proved in where that is not the
    file's; ``digests`` has a SHA-256 per entry of the state_dict, ``files`` one per file; ``folded`` says whether
    the model was folded; ``proof`` is for people: versions, device, report.
    """

    tensors: str
    factory: str
    plan: Plan
    digests: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    strip_prefix: tuple[str, ...] = ()
    dtype: str | None = None
    folded: bool = False
    proof: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The manifest as text, which ``read_manifest`` reads back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data.update(plan=json.loads(self.plan.to_json()), strip_prefix=list(self.strip_prefix))
        return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The folder of a converted checkpoint (``path`` is it, or its file) and its manifest, checked to speak of it.

    Raises CheckpointError.
    """
    folder = _folder(path)
    manifest = read_manifest(folder / MANIFEST)
    if folder != path and manifest.tensors != path.name:
        raise CheckpointError(f"{path}: {folder / MANIFEST} describes {manifest.tensors}, not this file")
    return folder, manifest


def is_converted(path: Path) -> bool:
    """Whether there is a manifest that speaks of ``path``, folder or file. Raises CheckpointError for a broken one."""
    folder = _folder(path)
    if not present(folder / MANIFEST).is_file():
        return False
    return folder == path or read_manifest(folder / MANIFEST).tensors == path.name


def _folder(path: Path) -> Path:
    try:
        return path if path.is_dir() else path.parent
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises CheckpointError for anything but one of this version."""
    if not present(path).is_file():
        raise CheckpointError(f"{path}: no such file; normswap convert writes it beside the tensors")
    data = read_json(present(path))
    if not isinstance(data, dict) or "format" not in data:
        raise CheckpointError(f"{path}: not written by normswap convert")
    if data["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {data['format']!r} is not {FORMAT}; convert again with this version")
    for key, check in _CHECKS.items():
        if not check(data.get(key)):
            raise CheckpointError(f"{path}: has no {key}, or not one of its kind; convert again")
    name = data["tensors"]
    if not is_plain(name) or not _is_checkpoint(name):
        raise CheckpointError(f"{path}: tensors {name!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    try:
        plan = Plan.from_json(json.dumps(data["plan"]))
    except PlanError as error:
        raise CheckpointError(f"{path}: {error}") from error
    known = {f.name for f in dataclasses.fields(Manifest)}
    kept = {key: value for key, value in data.items() if key in known}
    return Manifest(**{**kept, "plan": plan, "strip_prefix": tuple(data["strip_prefix"])})


def _is_checkpoint(name: str) -> bool:
    return name.endswith(INDEX) or Path(name).suffix in SUFFIXES


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_text_or_none(value: object) -> bool:
    return value is None or _is_text(value)


def _is_digests(value: object) -> bool:
    return isinstance(value, dict) and all(re.fullmatch("[0-9a-f]{64}", str(v)) for v in value.values())


def _is_files(value: object) -> bool:
    return isinstance(value, dict) and _is_digests(value) and all(map(is_plain, value))


def _is_dtype(value: object) -> bool:
    return value is None or (_is_text(value) and isinstance(getattr(torch, str(value), None), torch.dtype))


_CHECKS = {
    "tensors": _is_text,
    "factory": _is_text,
    "plan": lambda value: isinstance(value, dict),
    "digests": _is_digests,
    "files": _is_files,
    "kwargs": lambda value: isinstance(value, dict),
    "key": _is_text_or_none,
    "strip_prefix": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "dtype": _is_dtype,
    "folded": lambda value: isinstance(value, bool),
    "proof": lambda value: isinstance(value, dict),
}
