"""Open what ``convert`` wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from normswap import native
from normswap.apply import apply
from normswap.checkpoint import folded
from normswap.checkpoint.construct import load_strictly
from normswap.checkpoint.digests import difference, digests
from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.factory import PICKLED, build_model, is_code
from normswap.checkpoint.files import present, sha256
from normswap.checkpoint.manifest import MANIFEST, Manifest, find_manifest
from normswap.checkpoint.models import open_model, usable_device
from normswap.checkpoint.reading import Checkpoint, open_checkpoint


def load_model(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    trust_factory: bool = False,
    map_location: str | torch.device = "cpu",
) -> nn.Module:
    """Open what ``convert`` wrote: the model with its tensors and swapped norms, on ``map_location``, in eval mode.

    ``path`` is the OUT of ``convert``, file or folder. A model of timm's, or of the folder's own config.json, is built
    by the library that is installed. Where ``normswap.json`` names a function instead, ``trust_factory=True`` IMPORTS
    AND RUNS THAT CODE; or give ``model`` (it is filled, swapped in place and returned, and nothing is imported). Sites
    rolled back at conversion stay as they are in the original.

    Raises CheckpointError when a file is missing, damaged, not the one the manifest was written for, or does not
    fit the model, and PlanError when the model no longer has the sites that were swapped.
    """
    folder, manifest = find_manifest(Path(path))
    where = usable_device(map_location)
    if model is None and is_code(manifest.factory) and not trust_factory:
        raise CheckpointError(
            f"{folder / MANIFEST}: the model is built by {manifest.factory!r}, which is not run unasked; pass "
            "trust_factory=True if you trust where this comes from, or model= with the model built"
        )
    found = open_converted(folder, manifest, mapped=where.type != "cpu", allow_pickle=trust_factory)
    opened = _rebuilt(folder, manifest, found, model)
    if manifest.dtype is not None:
        opened = opened.to(getattr(torch, manifest.dtype))
    opened = opened.eval().to(where)
    apply(opened, manifest.plan)
    native.load(build=where.type == "cuda")
    return opened


def open_converted(folder: Path, manifest: Manifest, *, mapped: bool = True, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint that a manifest speaks of.

    Raises CheckpointError unless every file has its SHA-256, saying which tensors changed if one has not.
    """
    main = folder / manifest.tensors
    changed = [name for name in manifest.files if not _is_the_file(folder / name, manifest)]
    found = open_checkpoint(
        main,
        key=manifest.key,
        strip_prefix=manifest.strip_prefix,
        allow_pickle=allow_pickle and manifest.factory == PICKLED,
        mapped=mapped or bool(changed),
    )
    told = difference(manifest.digests, digests(found.state)) if changed or not manifest.files else None
    if changed or told:
        what = listed(changed) or main.name
        raise CheckpointError(
            f"{main}: not the tensors {folder / MANIFEST} was written for: {what} differs ({told or 'no tensor does'})"
        )
    return found


def _is_the_file(path: Path, manifest: Manifest) -> bool:
    if not present(path).is_file():
        raise CheckpointError(f"{path}: no such file, but {path.parent / MANIFEST} was written for it")
    try:
        return sha256(present(path)) == manifest.files[path.name]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error


def _rebuilt(folder: Path, manifest: Manifest, found: Checkpoint, model: nn.Module | None) -> nn.Module:
    if manifest.folded:
        built = build_model(manifest.factory, manifest.kwargs, folder=folder) if model is None else model
        opened = folded.fold(built)
        load_strictly(opened, found.state, found.main)
        return opened
    if model is None:
        return open_model(found, manifest.factory, manifest.kwargs)
    load_strictly(model, found.state, found.main, assign=any(p.is_meta for p in model.parameters()))
    return model
