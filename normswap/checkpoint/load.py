"""Open what ``convert`` and ``save`` wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from normswap.checkpoint import folded
from normswap.checkpoint.construct import load_strictly
from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.factory import PICKLED, build_model, is_code
from normswap.checkpoint.files import sha256
from normswap.checkpoint.manifest import Manifest, find_manifest
from normswap.checkpoint.models import open_model, ready, usable_device
from normswap.checkpoint.reading import Checkpoint, open_checkpoint
from normswap.optimize import apply


def load_model(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    trust_factory: bool = False,
    map_location: str | torch.device = "cpu",
    check_digests: bool = True,
) -> nn.Module:
    """Open what ``convert`` or ``save`` wrote: the model with its tensors and swapped norms, on ``map_location``, in
    eval mode.

    ``path`` is the OUT of ``convert``, file or folder. A model of timm's, or of the folder's own config.json, is built
    by the library that is installed. Where the manifest names a function instead, ``trust_factory=True`` IMPORTS AND
    RUNS THAT CODE; or give ``model`` (it is filled, swapped in place and returned, and nothing is imported). Sites
    rolled back at conversion stay as they are in the original. ``check_digests=False`` does not compare the files with
    their digests, which takes about as long as reading them.

    Raises CheckpointError when a file is missing, damaged, not the one the manifest was written for, or does not
    fit the model, and PlanError when the model no longer has the sites that were swapped.
    """
    place, manifest = find_manifest(Path(path))
    where = usable_device(map_location)
    if model is None and not manifest.factory:
        raise CheckpointError(f"{place}: says nothing of what builds the model; pass model= with the model built")
    if model is None and is_code(manifest.factory) and not trust_factory:
        raise CheckpointError(
            f"{place}: the model is built by {manifest.factory!r}, which is not run unasked; pass "
            "trust_factory=True if you trust where this comes from, or model= with the model built"
        )
    with checked(place, manifest, check_digests) as wait:
        if manifest.factory == PICKLED:
            wait()
        found = open_converted(place, manifest, allow_pickle=trust_factory)
        opened = ready(_rebuilt(manifest, found, model, share=where.type != "cpu"), where)
    _tell_of_another_gpu(manifest, where)
    return apply(opened, manifest.plan, inplace=True)


@contextmanager
def checked(place: Path, manifest: Manifest, check: bool = True) -> Iterator[Callable[[], None]]:
    """While the block runs the manifest's files are compared with their digests; what is yielded waits for that.

    Raises CheckpointError for one that is missing or another, rather than what the block raises for its sake.
    """
    for name in manifest.files:
        if not (place.parent / name).is_file():
            raise CheckpointError(f"{place.parent / name}: no such file, but {place} was written for it")
    pool = ThreadPoolExecutor(2)
    names = manifest.files if check else ()
    sums = {name: pool.submit(sha256, place.parent / name) for name in names}

    def wait() -> None:
        try:
            changed = [name for name, digest in sums.items() if digest.result() != manifest.files[name]]
        except OSError as error:
            raise CheckpointError(f"{place.parent}: cannot be read ({one_line(error)})") from error
        if changed:
            main = place.parent / manifest.tensors
            raise CheckpointError(f"{main}: not the tensors {place} was written for: {listed(changed)} differs")

    try:
        yield wait
    finally:
        with pool:
            wait()


def open_converted(place: Path, manifest: Manifest, *, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint that a manifest speaks of. Raises CheckpointError."""
    return open_checkpoint(
        place.parent / manifest.tensors,
        key=manifest.key,
        strip_prefix=manifest.strip_prefix,
        allow_pickle=allow_pickle and manifest.factory == PICKLED,
    )


def _rebuilt(manifest: Manifest, found: Checkpoint, model: nn.Module | None, *, share: bool) -> nn.Module:
    if manifest.folded:
        opened = folded.fold(build_model(manifest.factory, manifest.kwargs) if model is None else model)
        load_strictly(opened, found.state, found.main)
    elif model is None:
        return open_model(found, manifest.factory, manifest.kwargs, manifest.dtype, share=share)
    else:
        load_strictly(opened := model, found.state, found.main, share=share)
    return opened.eval() if manifest.dtype is None else opened.eval().to(getattr(torch, manifest.dtype))


def _tell_of_another_gpu(manifest: Manifest, where: torch.device) -> None:
    measured = manifest.proof.get("gpu")
    here = torch.cuda.get_device_name(where) if where.type == "cuda" else measured
    if measured != here and measured is not None:
        warnings.warn(
            f"normswap: what is swapped was chosen by its speed on {measured}, and this is {here}; measure again with "
            "normswap.optimize(normswap.revert(model), example_inputs, inplace=True)",
            stacklevel=3,
        )
