"""Open what ``convert`` and ``save`` wrote, and say whether two checkpoints are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import native
from normswap.arguments import check_model
from normswap.checkpoint.conversion import folded
from normswap.checkpoint.errors import check, failing, listed
from normswap.checkpoint.files import digest
from normswap.checkpoint.models import (
    PICKLED,
    build_model,
    filled,
    in_dtype,
    is_code,
    moved,
    open_model,
    ready,
    usable_device,
)
from normswap.checkpoint.reading import Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import difference, size_of
from normswap.checkpoint.writing import MANIFEST, Manifest, find_manifest, manifest_of
from normswap.pipeline import apply, validate
from normswap.reports import Report


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

    A model of timm's, or of the folder's own config.json, is built by the library that is installed. Where the manifest
    names a function instead, ``trust_factory=True`` IMPORTS AND RUNS THAT CODE; or give ``model``: it is filled,
    swapped in place and returned, and nothing is imported. ``check_digests=False`` does not compare the files with
    their digests, which takes most of the time. A model built on the meta device has its tensors where the file is
    mapped, which may then be replaced but not written into. Raises CheckpointError when a file is missing, damaged,
    another than was written, or does not fit the model, PlanError when that no longer has the sites that were swapped,
    TypeError when ``model`` is no nn.Module.
    """
    if model is not None:
        check_model(model)
    (place, manifest), where = find_manifest(Path(path)), usable_device(map_location)
    known = model is not None or manifest.factory
    check(known, f"{place}: says nothing of what builds the model; pass model= with the model built")
    trusted = model is not None or trust_factory or not is_code(manifest.factory)
    cure = (
        "pass trust_factory=True (--trust-factory) if you trust where this comes from, or model= with the model built"
    )
    check(trusted, f"{place}: the model is built by {manifest.factory!r}, which is not run unasked; {cure}")
    unpickled = trust_factory and manifest.factory == PICKLED
    with ThreadPoolExecutor(1) as beside, _converted(place, manifest, check_digests, unpickled) as found:
        beside.submit(native.status)  # the kernels' library is found and loaded while the tensors are copied
        if model is None and not manifest.folded:
            opened = open_model(found, manifest.factory, manifest.kwargs, manifest.dtype)
        else:
            built = build_model(manifest.factory, manifest.kwargs) if model is None else model
            opened = filled(folded(built) if manifest.folded else built, found, manifest.dtype)
        opened = ready(opened, where)
    return apply(opened, manifest.plan, inplace=True)


@contextmanager
def _converted(
    place: Path, manifest: Manifest, check_digests: bool = True, allow_pickle: bool = False
) -> Iterator[Checkpoint]:
    """The checkpoint that a manifest speaks of; while the block runs its files are compared with their digests. Raises
    CheckpointError for one that is missing or another, rather than what the block raises for its sake."""
    main = place.parent / manifest.tensors
    for name in manifest.files:
        check((place.parent / name).is_file(), f"{place.parent / name}: no such file, but {place} was written for it")
    with ThreadPoolExecutor(2) as pool:
        sums = {name: pool.submit(digest, place.parent / name) for name in manifest.files if check_digests}

        def compare() -> None:
            with failing(f"{place.parent}: cannot be read", OSError):
                changed = [name for name, found in sums.items() if found.result() != manifest.files[name]]
            check(not changed, f"{main}: not the tensors {place} was written for: {listed(changed)} differs")

        try:
            if allow_pickle:
                compare()  # nothing of a file that was changed is unpickled
            yield open_checkpoint(main, key=manifest.key, strip_prefix=manifest.strip_prefix, allow_pickle=allow_pickle)
        finally:
            compare()


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found: ``tensors`` and ``outputs`` are what differs, None where nothing does, ``report`` is None
    where no outputs were compared."""

    count: int
    size: int
    tensors: str | None
    outputs: str | None = None
    report: Report | None = None

    @property
    def same(self) -> bool:
        return self.tensors is None and self.outputs is None

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return {**asdict(self), "report": self.report and self.report.to_dict(), "same": self.same}

    def __str__(self) -> str:
        same = f"the same, bit for bit ({self.count} tensors, {self.size:,} bytes)"
        found = f"tensors: {same if self.tensors is None else f'NOT the same: {self.tensors}'}"
        outputs = self.outputs or "the same within the proof's limits"
        return found if self.report is None else f"{found}\noutputs: {outputs}\n{self.report}"


def verify(
    one: str | Path,
    other: str | Path | None = None,
    *,
    key: str | None = None,
    strip_prefix: Sequence[str] = (),
    inputs: tuple[Any, ...] = (),
    input_kwargs: Mapping[str, Any] | None = None,
    trust_factory: bool = False,
    device: str | None = None,
) -> Verdict:
    """Compare the tensors of two checkpoints, and the files of each, or of ``one`` alone, with the digests in its
    ``normswap.json``, if it has one; ``key`` and ``strip_prefix`` find the tensors of those that have none. Where
    ``other`` (or ``one``, alone) was converted and there are inputs, its swapped model is proved against the original
    one on them, in the dtype that it was converted to. Raises CheckpointError when one of them cannot be read, or is
    not what its manifest was written for."""
    first = _opened(Path(one), key, strip_prefix)
    comparable = other is not None or manifest_of(Path(one)).is_file()
    check(comparable, f"{one}: has no {MANIFEST} to compare with; give a second checkpoint")
    differs = None if other is None else difference(first.state, _opened(Path(other), key, strip_prefix).state)
    count, size = len(first.tensors), sum(map(size_of, first.tensors.values()))
    if differs is not None or not (inputs or input_kwargs):
        return Verdict(count, size, differs)
    where = usable_device(device)
    model = load_model(other or one, trust_factory=trust_factory, map_location=where, check_digests=False)
    dtype = find_manifest(Path(other or one))[1].dtype
    args, named = moved(in_dtype((inputs, dict(input_kwargs or {})), dtype), where)
    report = validate(model, args or None, named or None, on_mismatch="warn")
    failed = ", ".join(row["name"] or "(root)" for row in report.rows if row["status"] == "failed")
    outputs = f"NOT the same at {failed}" if failed else None
    if not failed and report.model is not None and not report.model["passed"]:
        outputs = f"NOT within the limit: {report.model['problem'] or report.model['max_error']}"
    return Verdict(count, size, None, outputs, report)


def _opened(path: Path, key: str | None, strip_prefix: Sequence[str]) -> Checkpoint:
    """The checkpoint at ``path``, held to its manifest where it has one."""
    if not manifest_of(path).is_file():
        return open_checkpoint(path, key=key, strip_prefix=strip_prefix)
    place, manifest = find_manifest(path)
    with _converted(place, manifest) as found:
        return found
