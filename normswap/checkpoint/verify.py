"""Whether two checkpoints are the same: their tensors bit for bit, and what their models answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normswap.checkpoint.errors import CheckpointError
from normswap.checkpoint.load import checked, load_model, open_converted
from normswap.checkpoint.manifest import MANIFEST, find_manifest, is_converted
from normswap.checkpoint.models import moved, usable_device
from normswap.checkpoint.reading import Checkpoint, open_checkpoint
from normswap.checkpoint.tensors import difference
from normswap.optimize import validate
from normswap.report import Report


@dataclass(frozen=True)
class Verdict:
    """What ``verify`` found. ``tensors`` and ``outputs`` are None where they are the same, else what differs;
    ``report`` is None where no outputs were compared."""

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
        lines = [
            f"tensors: the same, bit for bit ({self.count} tensors, {self.size:,} bytes)"
            if self.tensors is None
            else f"tensors: NOT the same: {self.tensors}"
        ]
        if self.report is not None:
            lines.append(
                "outputs: the same within the proof's limits" if self.outputs is None else f"outputs: {self.outputs}"
            )
            lines.append(str(self.report))
        return "\n".join(lines)


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
    """Compare the tensors of two checkpoints, and of each with the digests in its ``normswap.json``, if it has one.
    Without ``other`` there is only that to compare with.

    ``key`` and ``strip_prefix`` find the tensors of those that have none. Where ``other`` (or ``one``, alone) was
    converted and there are inputs, its swapped model is proved against the original one on them.

    Raises CheckpointError when one of them cannot be read, or is not what its manifest was written for.
    """
    first, own = _opened(Path(one), key, strip_prefix)
    if other is None and not own:
        raise CheckpointError(f"{one}: has no {MANIFEST} to compare with; give a second checkpoint")
    second = first if other is None else _opened(Path(other), key, strip_prefix)[0]
    told = None if other is None else difference(first.state, second.state)
    size = sum(t.nbytes for t in first.tensors.values())
    if told is not None or not (inputs or input_kwargs):
        return Verdict(len(first.tensors), size, told)
    where = usable_device(device)
    model = load_model(other or one, trust_factory=trust_factory, map_location=where, check_digests=False)
    args, named = moved((inputs, dict(input_kwargs or {})), where)
    report = validate(model, args or None, named or None, on_mismatch="warn")
    return Verdict(len(first.tensors), size, None, _outputs(report), report)


def _opened(path: Path, key: str | None, strip_prefix: Sequence[str]) -> tuple[Checkpoint, bool]:
    """The checkpoint at ``path``, and whether it was held to a manifest of its own."""
    if not is_converted(path):
        return open_checkpoint(path, key=key, strip_prefix=strip_prefix), False
    place, manifest = find_manifest(path)
    with checked(place, manifest):
        return open_converted(place, manifest), True


def _outputs(report: Report) -> str | None:
    failed = [row["name"] or "(root)" for row in report.rows if row["status"] == "failed"]
    if failed:
        return f"NOT the same at {', '.join(failed)}"
    if report.model is not None and not report.model["passed"]:
        return f"NOT within the limit: {report.model['problem'] or report.model['max_error']}"
    return None
