"""Convert a checkpoint into one that opens swapped.

The tensors stay what they were, bit for bit. What is added is ``normswap.json`` beside them: which function builds the
model, what was swapped in it, how that was proved, and the digest of every tensor it speaks of.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from normswap import native
from normswap.checkpoint import folded
from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.factory import HERE, PICKLED, settled
from normswap.checkpoint.manifest import Manifest
from normswap.checkpoint.models import factory_for, moved, open_model, optimized, ready, usable_device
from normswap.checkpoint.reading import CONFIG, METADATA, Checkpoint, distributed, open_checkpoint
from normswap.checkpoint.tensors import SUFFIXES
from normswap.checkpoint.writing import Progress, Target, check_extra, place, write
from normswap.optimize import Filter, OnEmpty, OnMismatch, Validate
from normswap.plan import Plan
from normswap.report import Report

DISTRIBUTED = ".dcp"
"""The end of the name of an OUT that shall be a folder of torch.distributed.checkpoint."""


def convert(
    source: str | Path,
    out: str | Path | None,
    factory: str | None = None,
    *,
    factory_kwargs: Mapping[str, Any] | None = None,
    key: str | None = None,
    strip_prefix: Sequence[str] = (),
    allow_pickle: bool = False,
    inputs: Tensor | tuple[Any, ...] | None = None,
    input_kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    include: Filter = None,
    exclude: Filter = None,
    validate: Validate = "auto",
    on_mismatch: OnMismatch = "rollback",
    on_empty: OnEmpty = "warn",
    min_speedup: float = 1.0,
    fold: bool = False,
    export: str | Path | None = None,
    report_file: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
) -> Report:
    """Write to ``out`` the checkpoint ``source`` as one that ``load_model`` opens swapped; returns the proof.

    The model comes from ``factory`` (see ``build_model``; a folder with config.json and a pickled model need none),
    takes the tensors that ``open_checkpoint`` finds strictly, goes to ``device`` (CUDA where there is any, else the
    CPU) and ``dtype``, and is optimized there in eval mode; the other arguments are those of ``optimize``. ``out`` with
    a suffix of SUFFIXES is a file, one of DISTRIBUTED a folder of torch.distributed.checkpoint, any other a folder in
    which what the model in the folder ``source`` needs keeps its name, and None adds only a manifest beside ``source``.
    The tensors are those of ``source``, bit for bit, also from one
    format into the other, and ``out`` may be ``source``.

    ``fold`` writes a plain model instead, without the BatchNorms that fold into a Linear. ``export`` names a .pt2 file
    for a torch.export program, ``report_file`` one for the proof as JSON. ``dry_run`` writes nothing. ``say`` is told
    what was chosen, a line each.

    Raises CheckpointError (unreadable, unfit, ``out`` exists and not ``force``), MismatchError and
    NothingSwappedError as ``optimize`` does. Nothing is written unless everything succeeded.
    """
    path, target_path = Path(source), None if out is None else Path(out)
    found = open_checkpoint(path, key=key, strip_prefix=strip_prefix, allow_pickle=allow_pickle)
    for note in found.notes if say is not None else ():
        say(note)  # type: ignore[misc]
    factory = settled(factory or factory_for(path, found))
    with _as_distributed(path, found, target_path, fold) as (path, held):
        written, target = held, place(path, held, target_path, force)
        if fold:
            target = _for_folded(target, out)
        _check_target(held, target, factory, fold)
        extra = partial(check_extra, found=found, target=target, force=force)
        program = None if export is None else extra(Path(export), ".pt2")
        proof_file = None if report_file is None else extra(Path(report_file), "")
        where = usable_device(device)
        model = ready(open_model(held, factory, factory_kwargs, dtype, share=True), where)
        given = moved((inputs, dict(input_kwargs or {})), where)
        if fold:
            product, made = folded.folded(model, *given)
            written = folded.replaced(held, product)
        else:
            options: dict[str, Any] = {"validate": validate, "on_mismatch": on_mismatch, "on_empty": on_empty}
            options.update(min_speedup=min_speedup, include=include, exclude=exclude)
            product, made = optimized(model, given, **options)
        more: dict[Path, Callable[[Path], object]] = {}
        if program is not None:
            more[program] = _exporter(product, given, program)
        if proof_file is not None:
            more[proof_file] = lambda place: place.write_text(made.to_json() + "\n", encoding="utf-8")
        manifest = Manifest(
            tensors=target.main.name,
            factory=factory,
            plan=Plan() if fold else made.plan,
            kwargs=dict(factory_kwargs or {}),
            key=written.key if target.copied else None,
            strip_prefix=written.prefixes if target.copied else (),
            dtype=dtype,
            folded=fold,
            proof=proof_of(made, where),
        )
        if not dry_run:
            write(written, target, manifest, more, progress)
    return made


def versions() -> dict[str, str]:
    """The versions a conversion depends on."""
    try:
        own = importlib.metadata.version("normswap")
    except importlib.metadata.PackageNotFoundError:
        own = "0+unknown"
    return {"normswap": own, "torch": str(torch.__version__), "python": platform.python_version()}


@contextmanager
def _as_distributed(source: Path, found: Checkpoint, out: Path | None, fold: bool) -> Iterator[tuple[Path, Checkpoint]]:
    """The checkpoint, and its path, as a DCP folder where ``out`` shall be one and it is none yet."""
    if out is None or out.suffix != DISTRIBUTED or found.main.name == METADATA or fold:
        yield source, found
        return
    with TemporaryDirectory(prefix="normswap-") as folder:
        distributed().write_distributed(Path(folder), found.tensors)
        yield Path(folder), replace(open_checkpoint(folder), notes=found.notes)


def _for_folded(target: Target, out: str | Path | None) -> Target:
    """The target of a folded model: one file, written anew. Raises CheckpointError when it cannot be."""
    if out is None:
        raise CheckpointError(f"{target.main}: a folded model has other tensors; give OUT")
    if target.main.suffix not in SUFFIXES:
        raise CheckpointError(f"{target.main}: a folded model is one file; name one ending in {', '.join(SUFFIXES)}")
    return replace(target, sources={}, copied=False, in_place=False)


def _check_target(found: Checkpoint, target: Target, factory: str, fold: bool) -> None:
    if factory in (HERE, PICKLED) and fold:
        raise CheckpointError(f"{found.main}: what is folded is built anew when opened; pass a factory (--model)")
    if factory in (HERE, PICKLED) and not target.copied:
        raise CheckpointError(
            f"{target.main}: the model lies beside, or in, {found.main}; name a folder, or the same format"
        )
    if factory == HERE and not target.in_place and (target.main.parent / CONFIG) not in target.sources:
        raise CheckpointError(f"{target.main}: the model is described by {CONFIG} in {found.folder}; name a folder")
    if found.others and not target.copied and not fold:
        raise CheckpointError(
            f"{target.main}: cannot hold what {found.main} has besides tensors: {listed(list(found.others))}; "
            f"name a file that ends in {found.main.suffix}"
        )


def proof_of(made: Report, device: torch.device) -> dict[str, Any]:
    """What a manifest tells people."""
    return {
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "kernels": native.status().origin,
        "report": json.loads(made.to_json()),
    }


def _exporter(model: nn.Module, given: tuple[Any, dict[str, Any]], path: Path) -> Callable[[Path], object]:
    """What writes the torch.export program of ``model``. Raises CheckpointError when there can be none."""
    inputs, kwargs = given
    if inputs is None and not kwargs:
        raise CheckpointError(f"{path}: torch.export needs example inputs (--input)")
    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    try:
        program = torch.export.export(model, args, kwargs or None)
        content = io.BytesIO()
        torch.export.save(program, content)
    except Exception as error:  # torch.export raises anything on what it cannot follow
        raise CheckpointError(f"{path}: {type(model).__name__} cannot be exported: {one_line(error)}") from error
    return lambda place: place.write_bytes(content.getbuffer())
