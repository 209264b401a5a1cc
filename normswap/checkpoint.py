"""Convert a checkpoint into one that opens swapped, and open it.

The tensors stay what they were, bit for bit. What is added is ``normswap.json`` beside them: which function builds the
model, what was swapped in it, how that was proved, and the digest of the tensors it speaks of.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normswap import native
from normswap.apply import apply
from normswap.factory import build_model, load_strictly
from normswap.files import replacing, sha256
from normswap.modules import site_match
from normswap.optimize import Filter, OnEmpty, OnMismatch, Validate, optimize, plan, report
from normswap.plan import NormswapError, Plan, PlanError
from normswap.report import Report
from normswap.tensors import (
    SUFFIXES,
    CheckpointError,
    one_line,
    read_as,
    read_tensors,
    same_format,
    same_tensors,
    tensor_writer,
    write_tensors,
)

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "build_model",
    "convert",
    "load_model",
    "read_tensors",
    "versions",
    "write_tensors",
]

MANIFEST = "normswap.json"
MANIFEST_FORMAT = 1


def convert(
    source: str | Path,
    out: str | Path,
    factory: str,
    *,
    inputs: Tensor | tuple[Any, ...] | None = None,
    input_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    include: Filter = None,
    exclude: Filter = None,
    validate: Validate = "auto",
    on_mismatch: OnMismatch = "rollback",
    on_empty: OnEmpty = "warn",
    force: bool = False,
) -> Report:
    """Write to ``out`` the checkpoint ``source`` as one that ``load_model`` opens swapped; returns the proof.

    The model comes from ``factory`` ("pkg.module:function", imported and called), takes the tensors strictly, goes to
    ``device`` (CUDA where there is any, else the CPU) and is optimized there in eval mode; the other arguments are
    those of ``optimize``. ``out`` with a suffix of SUFFIXES is a file, without one a folder in which the tensors file
    keeps its name; ``normswap.json`` lies beside it. The tensors are those of ``source``, bit for bit, also from one
    format into the other, and ``out`` may be ``source``.

    Raises CheckpointError (unreadable, unfit, ``out`` exists and not ``force``), MismatchError and
    NothingSwappedError as ``optimize`` does. Nothing is written unless everything succeeded.
    """
    source = Path(source)
    target = _target(source, Path(out))
    _check_free(target, force)
    tensors, metadata = read_tensors(source)
    model = build_model(factory)
    load_strictly(model, tensors, source)
    where = _device(device)
    swapped, planned = _optimized(
        model.eval(),
        where,
        inputs,
        dict(input_kwargs or {}),
        {"include": include, "exclude": exclude},
        {"validate": validate, "on_mismatch": on_mismatch, "on_empty": on_empty},
    )
    proof = report(swapped)
    manifest = {
        "format": MANIFEST_FORMAT,
        "factory": factory,
        "tensors": target.name,
        "plan": json.loads(_kept(swapped, planned).to_json()),
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(where),
        "gpu": torch.cuda.get_device_name(where) if where.type == "cuda" else None,
        "kernels": native.status().origin,
        "report": proof.to_dict(),
    }
    _write(source, target, tensors, metadata, manifest)
    return proof


def load_model(
    path: str | Path, *, model: nn.Module | None = None, map_location: str | torch.device = "cpu"
) -> nn.Module:
    """Open what ``convert`` wrote: the model with its tensors and swapped norms, on ``map_location``, in eval mode.

    ``path`` is the OUT of ``convert``, file or folder. The model is built by the function that ``normswap.json`` names,
    WHICH IMPORTS AND RUNS THAT CODE: open only folders you trust, or give ``model`` (it is filled, swapped in place and
    returned, and nothing is imported). Sites rolled back at conversion stay as they are in the original.

    Raises CheckpointError when a file is missing, damaged, not the one the manifest was written for, or does not
    fit the model, and PlanError when the model no longer has the sites that were swapped.
    """
    folder, manifest = _find_manifest(Path(path))
    file = folder / manifest["tensors"]
    where = _device(map_location)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file, but {folder / MANIFEST} was written for it")
    if sha256(file) != manifest["sha256"]:
        raise CheckpointError(f"{file}: not the file {folder / MANIFEST} was written for (its SHA-256 differs)")
    tensors, _ = read_tensors(file)
    opened = build_model(manifest["factory"]) if model is None else model
    load_strictly(opened, tensors, file)
    try:
        swaps = Plan.from_json(json.dumps(manifest["plan"]))
    except PlanError as error:
        raise CheckpointError(f"{folder / MANIFEST}: {error}") from error
    opened = opened.eval().to(where)
    apply(opened, swaps)
    native.load(build=where.type == "cuda")
    return opened


def versions() -> dict[str, str]:
    """The versions a conversion depends on."""
    try:
        own = importlib.metadata.version("normswap")
    except importlib.metadata.PackageNotFoundError:
        own = "0+unknown"
    return {"normswap": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _target(source: Path, out: Path) -> Path:
    """The tensors file that ``out`` stands for."""
    if out.suffix in SUFFIXES and not out.is_dir():
        return out
    if out.suffix and not out.is_dir():
        raise CheckpointError(
            f"{out}: suffix {out.suffix!r} is not one of {', '.join(SUFFIXES)} (a folder of that name must exist first)"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(
            f"{out}: exists and is not a folder; name a folder, or a file ending in {', '.join(SUFFIXES)}"
        )
    return out / source.name


def _check_free(target: Path, force: bool) -> None:
    if target.is_dir():
        raise CheckpointError(f"{target}: is a folder")
    if force:
        return
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already; pass force (--force) to replace it")
    manifest = target.parent / MANIFEST
    if os.path.lexists(manifest) and _described(manifest) != target.name:
        raise CheckpointError(
            f"{manifest}: exists and describes another file; choose another folder, or pass force (--force)"
        )


def _described(manifest: Path) -> str | None:
    """The tensors file an existing manifest speaks of; None when it is not one of ours."""
    try:
        return str(_read_manifest(manifest)["tensors"])
    except CheckpointError:
        return None


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except Exception as error:  # RuntimeError, AssertionError or NotImplementedError, depending on the build of torch
        raise CheckpointError(f"device {str(device)!r} cannot be used here ({one_line(error)})") from error


def _optimized(
    model: nn.Module,
    device: torch.device,
    inputs: Any,
    kwargs: dict[str, Any],
    filters: dict[str, Any],
    options: dict[str, Any],
) -> tuple[nn.Module, Plan]:
    """A swapped copy of ``model`` on ``device``, and all that was planned for it."""
    try:
        model = model.to(device)
        inputs, kwargs = _moved((inputs, kwargs), device)
        swapped = optimize(model, inputs, kwargs or None, **filters, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optimize has planned, and warned, before
            return swapped, plan(model, **filters)
    except NormswapError:
        raise
    except Exception as error:  # the model's own code may raise anything on these inputs
        raise CheckpointError(f"{type(model).__name__} could not be optimized: {one_line(error)}") from error


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def _kept(model: nn.Module, planned: Plan) -> Plan:
    """The part of ``planned`` that is in ``model`` after sites that failed were put back."""
    kept = tuple(swap for swap in planned.swaps if site_match(model.get_submodule(swap.site.name)) == swap.match)
    return Plan(kept, planned.refused)


def _write(
    source: Path, target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], manifest: dict[str, Any]
) -> None:
    in_place = target.exists() and target.samefile(source)
    try:
        with replacing() as files:
            written = target if in_place else files.write(target, _filler(source, target, tensors, metadata))
            if not in_place and not same_tensors(tensors, read_as(target.suffix, written)[0]):
                raise CheckpointError(
                    f"{target}: what was written does not read back equal to {source}; nothing is kept"
                )
            text = json.dumps({**manifest, "sha256": sha256(written)}, indent=2) + "\n"
            files.write(target.parent / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({one_line(error)})") from error


def _filler(
    source: Path, target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Callable[[Path], Any]:
    if same_format(source, target):
        return lambda path: shutil.copyfile(source, path)
    return tensor_writer(target, tensors, metadata)


def _find_manifest(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a converted checkpoint and its manifest, checked to speak of ``path``."""
    folder = path if path.is_dir() else path.parent
    manifest = _read_manifest(folder / MANIFEST)
    if folder != path and manifest["tensors"] != path.name:
        raise CheckpointError(f"{path}: {folder / MANIFEST} describes {manifest['tensors']}, not this file")
    return folder, manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; normswap convert writes it beside the tensors") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path}: not written by normswap convert")
    if manifest["format"] != MANIFEST_FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} is not {MANIFEST_FORMAT}; convert again with this version"
        )
    for key in ("factory", "tensors", "sha256"):
        if not isinstance(manifest.get(key), str):
            raise CheckpointError(f"{path}: has no {key}; convert again")
    if not isinstance(manifest.get("plan"), dict):
        raise CheckpointError(f"{path}: has no plan; convert again")
    name = manifest["tensors"]
    if Path(name).name != name or Path(name).suffix not in SUFFIXES:
        raise CheckpointError(f"{path}: tensors {name!r} is not the plain name of a {', '.join(SUFFIXES)} file")
    return manifest
