"""Write a model that was optimized in Python as ``convert`` writes one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from normswap.checkpoint.convert import DISTRIBUTED, proof_of
from normswap.checkpoint.factory import HERE, called, settled
from normswap.checkpoint.manifest import MANIFEST, Manifest, manifest_of
from normswap.checkpoint.reading import Checkpoint, distributed, open_checkpoint
from normswap.checkpoint.writing import Target, check_new, check_out, place, write
from normswap.optimize import report


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
    opens by itself; else with a model.safetensors. ``factory`` names what builds the model, as for ``convert``; without
    it ``load_model`` is to be given the model.

    Raises TypeError when ``model`` is no nn.Module, CheckpointError when ``path`` is there and not ``force``, or cannot
    be written; nothing is written then.
    """
    made, out = report(model), Path(path)
    is_file = check_out(out)
    own = getattr(model, "save_pretrained", None) if factory is None and not is_file else None
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    manifest = Manifest(
        tensors="",
        factory=HERE if own is not None else settled(factory or ""),
        plan=made.plan,
        kwargs=dict(factory_kwargs or {}),
        proof=proof_of(made, where),
    )
    if out.suffix != DISTRIBUTED and own is None:
        main = out if is_file else out / "model.safetensors"
        check_new([main, manifest_of(out)], force)
        target = Target(main, manifest_of(out) if is_file or out.is_dir() else out / MANIFEST, {}, copied=False)
        write(Checkpoint(main, (), OrderedDict(model.state_dict())), target, replace(manifest, tensors=main.name), {})
        return
    beside = next(folder for folder in out.absolute().parents if folder.is_dir())
    with TemporaryDirectory(prefix=".normswap-", suffix=".tmp", dir=beside) as name:
        folder = Path(name)
        if own is not None:
            called(f"{type(model).__name__}.save_pretrained", lambda: own(folder))
        else:
            called("torch.distributed.checkpoint", lambda: distributed().write_distributed(folder, model.state_dict()))
        found = open_checkpoint(folder)
        target = place(folder, found, out, force)
        write(found, target, replace(manifest, tensors=target.main.name), {})
