"""Write a checkpoint that opens swapped: from one that people have, or from a model optimized in Python.

The tensors stay what they were, bit for bit; ``normswap.json`` is added beside them.
"""

from __future__ import annotations

import datetime
import io
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normswap
from normswap import native
from normswap.checkpoint import models
from normswap.checkpoint.errors import check, failing
from normswap.checkpoint.models import HERE, PICKLED, factory_for, open_model
from normswap.checkpoint.reading import CONFIG, SETTINGS, Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import SUFFIXES
from normswap.checkpoint.writing import (
    Manifest,
    Target,
    as_folder,
    check_holds,
    check_new,
    manifest_of,
    place,
    reachable,
    write,
)
from normswap.folding import LIMIT, difference
from normswap.folding import fold as fold_model
from normswap.pipeline import report
from normswap.plans import MismatchError
from normswap.reports import Report

_WRAPPERS = (
    *("torch._dynamo.eval_frame.OptimizedModule", "torch.nn.parallel.DataParallel"),
    "torch.nn.parallel.DistributedDataParallel",
)
_LIBRARIES = ("transformers.modeling_utils.PreTrainedModel", "diffusers.models.modeling_utils.ModelMixin")


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
    fold: bool = False,
    export: str | Path | None = None,
    report_file: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    say: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> Report:
    """Write to ``out`` the checkpoint ``source`` as one that ``load_model`` opens swapped; returns the proof.

    The model comes from ``factory`` (see ``build_model``; a folder with config.json and a pickled model need none),
    takes the tensors that ``open_checkpoint`` finds strictly, goes to ``device`` (CUDA where there is any, else the
    CPU) and ``dtype``, and is optimized there in eval mode with ``options``, those of ``optimize``. ``out`` with a
    suffix of SUFFIXES is a file, with DISTRIBUTED a folder of torch.distributed.checkpoint, else a folder with what the
    model in the folder ``source`` needs; None adds only a manifest beside ``source``. The tensors are those of
    ``source``, bit for bit, also from one format into the other, and ``out`` may be ``source``.

    ``fold`` writes a plain model instead, without the BatchNorms that fold into a Linear or a convolution. ``export``
    names a .pt2 file for a torch.export program, ``report_file`` one for the proof as JSON. ``say`` is told what was
    chosen, a line each. Raises CheckpointError, MismatchError and NothingSwappedError. Nothing is written unless
    everything succeeded.
    """
    path = Path(source)
    target_path, program, proof = (None if name is None else reachable(name) for name in (out, export, report_file))
    _check_kwargs(factory_kwargs)
    found = open_checkpoint(path, key=key, strip_prefix=strip_prefix, allow_pickle=allow_pickle)
    for note in found.notes:
        say(note)
    factory = models.settled(factory or factory_for(path, found))
    with as_folder(path, found, None if fold else target_path) as (path, held):
        target = place(path, held, target_path, force, anew=fold)
        _check_target(held, target, factory, fold)
        for extra in filter(None, (program, proof)):
            check_new(extra, force, _taken(Path(source), found, target))
        one = program is not None and proof is not None and program.resolve() == proof.resolve()
        check(not one, f"{proof}: cannot be both the report and the program; name two files")
        check(program is None or program.suffix == ".pt2", f"{program}: a torch.export program is named .pt2")
        where = models.usable_device(device)
        model = models.ready(open_model(replace(held, shared=not target.anew), factory, factory_kwargs, dtype), where)
        args = (inputs,) if isinstance(inputs, Tensor) else inputs
        given = models.moved((args, dict(input_kwargs or {})), where)
        product, made = _folded(model, *given) if fold else models.optimized(model, given, **options)
        more = {} if program is None else {program: _exported(product, given, program)}
        more |= {} if proof is None else {proof: f"{made.to_json()}\n".encode()}
        manifest = _manifest(target, factory, factory_kwargs, made, where)
        at, prefixes = (None, ()) if target.anew else (held.key, held.prefixes)
        manifest = replace(manifest, key=at, strip_prefix=prefixes, dtype=dtype, folded=fold)
        if not dry_run:
            new = replace(held, state=OrderedDict(product.state_dict())) if fold else held
            write(new, target, manifest, more, force)
    return made


def save(
    model: nn.Module,
    path: str | Path,
    *,
    factory: str | None = None,
    factory_kwargs: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the tensors of ``model``, and what is swapped in it, so that ``load_model(path)`` opens it swapped.

    ``path`` is a file that ends in one of SUFFIXES, or a folder: of torch.distributed.checkpoint where it ends in
    ".dcp"; as its own ``save_pretrained`` writes it where ``model`` is one of transformers' or diffusers', which then
    opens by itself; else with a model.safetensors. ``factory`` is as for ``convert``; without it ``load_model`` is to
    be given the model. Of what torch.compile or data parallelism returns, the model inside is written. Raises
    TypeError when ``model`` is no nn.Module, and CheckpointError; nothing is written then.
    """
    model, out = _inside(model), reachable(path)
    made = report(model)
    _check_kwargs(factory_kwargs)
    if factory is not None:
        models.check_factory(factory)
    own = _own_saving(model) if factory is None and out.suffix not in SUFFIXES else None
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    held = Checkpoint(Path("model.safetensors"), (), OrderedDict(model.state_dict()))
    check(held.tensors, f"{out}: {type(model).__name__} has no parameters or buffers, so there is nothing to save")
    with as_folder(out, held, out, own) as (source, found):
        target = place(source, found, out, force, anew=not found.files)
        factory = HERE if own is not None else models.settled(factory or "")
        write(found, target, _manifest(target, factory, factory_kwargs, made, where), {}, force)


def _check_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    cure = "{}, in which the manifest keeps it ({}); give numbers, text, lists and dicts"
    for name, value in dict(kwargs or {}).items():
        with failing(f"factory_kwargs: {name} is no JSON", (TypeError, ValueError, RecursionError), form=cure):
            json.dumps(value)


def _inside(model: nn.Module) -> nn.Module:
    """The model that torch.compile or data parallelism wraps, without which its tensors have their names."""
    while _is_one(model, _WRAPPERS):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def _own_saving(model: nn.Module) -> Callable[[Path], object] | None:
    """``save_pretrained`` of a whole model of transformers or diffusers. That of others, and of a model with adapters,
    need not write all tensors, or a config.json that builds it."""
    whole = _is_one(model, _LIBRARIES) and not getattr(model, "_hf_peft_config_loaded", False)
    return model.save_pretrained if whole else None  # type: ignore[return-value]


def _is_one(model: nn.Module, classes: Sequence[str]) -> bool:
    """Whether ``model`` is of one of ``classes``, for which nothing is imported."""
    places = [name.rpartition(".") for name in classes]
    return any(isinstance(model, getattr(sys.modules.get(module), name, ())) for module, _, name in places)


def _taken(source: Path, found: Checkpoint, target: Target) -> Iterator[Path]:
    """The files of the checkpoint that is read, and of the one that is written."""
    yield from (*found.files, manifest_of(source), target.manifest)
    yield from filter(None, (*target.sources, *target.sources.values()))
    yield from (main.with_name(name) for main in (found.main, target.main) for name in (main.name, *SETTINGS))


def _check_target(found: Checkpoint, target: Target, factory: str, fold: bool) -> None:
    main, source = target.main, found.main
    check(target.sources or not fold, f"{main}: a folded model has other tensors; give OUT")
    lost = target.sources and factory == HERE and main.with_name(CONFIG) not in target.sources
    lost = lost or (target.anew and factory == PICKLED)
    cure = "pass a factory (--model)" if fold else "name a folder, or pass a factory (--model)"
    check(not lost, f"{main}: would be without the model, which lies beside, or in, {source}; {cure}")
    if target.anew and not fold:
        check_holds(main, found)


def _manifest(
    target: Target, factory: str, kwargs: Mapping[str, Any] | None, made: Report, device: torch.device
) -> Manifest:
    proof = {
        "versions": {"normswap": normswap.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "kernels": native.status().origin,
        "report": made.to_dict(),
    }
    return Manifest(target.main.name, factory, made.plan, kwargs=dict(kwargs or {}), proof=proof)


def _exported(model: nn.Module, given: tuple[Any, dict[str, Any]], path: Path) -> bytes:
    """The torch.export program of ``model``, to be written to ``path``."""
    inputs, kwargs = given
    check(inputs is not None or kwargs, f"{path}: torch.export needs example inputs (--input)")
    content = io.BytesIO()
    with failing(f"{path}: {type(model).__name__} cannot be exported", form="{}: {}"):
        torch.export.save(torch.export.export(model, inputs or (), kwargs or None), content)
    return content.getvalue()


def folded(model: nn.Module) -> nn.Module:
    """``normswap.fold(model)``. Raises what that does, and CheckpointError where the model's own code fails."""
    with failing(f"{type(model).__name__} cannot be folded", form="{}: {}"):
        return fold_model(model.eval())


def _folded(model: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[nn.Module, Report]:
    """The plain model, and a report of how far it is from ``model`` in float64. Raises CheckpointError without inputs,
    MismatchError when it is further away than float64 rounds."""
    check(inputs is not None or kwargs, "a folded model is proved by running it: give inputs (--input)")
    with failing(f"{type(model).__name__} could not be folded and run in float64", form="{}: {}"):
        error = difference(model.eval(), inputs, kwargs)
    if not error <= LIMIT:
        far = f"by {error:.3g} of its largest output in float64"
        raise MismatchError(f"the folded model differs from the original {far}")
    model_row = {"max_error": error, "limit": LIMIT, "problem": "", "passed": True}
    device = next((str(p.device) for p in model.parameters()), "none")
    note = "folded into a plain PyTorch model, which needs no normswap; compared in float64, by the largest output"
    return folded(model), Report((), device, "float64", "eval", "none, it is plain PyTorch", model_row, (note,))
