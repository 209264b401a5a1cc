"""What optimize() did and proved, for a person and for a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

from normswap.plan import KINDS, Plan

_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """``rows`` has a dict a site: name, kind, status ("proved", "wiring", "failed", "unchecked" or "refused"), swapped,
    inputs, mode, dtype, device, error_share, eager_error_share, gradients, coverage, detail, reason, cure."""

    rows: tuple[dict[str, Any], ...]
    device: str
    dtype: str
    mode: str
    kernels: str
    model: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the sites that are swapped now."""
        return tuple(row["name"] for row in self.rows if row["swapped"])

    def __str__(self) -> str:
        parts = [
            f"normswap: {len(self.swapped)} swapped on {self.device}, {self.dtype}, {self.mode} mode; "
            f"kernels: {self.kernels}",
            self._table(),
            self._model_line(),
            *self._lists(),
            *self.notes,
        ]
        return "\n".join(part for part in parts if part)

    def _table(self) -> str:
        lines = []
        for kind in KINDS:
            rows = [row for row in self.rows if row["kind"] == kind]
            if not rows:
                continue
            checked = [row for row in rows if row["swapped"] and row["status"] in ("proved", "wiring")]
            worst = max((row["error_share"] for row in checked), default=0.0)
            eager = max((row["eager_error_share"] for row in checked), default=0.0)
            lines.append(
                (
                    kind,
                    sum(row["swapped"] for row in rows),
                    sum(row["status"] == "proved" for row in rows),
                    sum(row["status"] == "wiring" for row in rows),
                    sum(row["status"] == "failed" for row in rows),
                    sum(row["status"] == "refused" for row in rows),
                    f"{worst:.0%}" if checked else "-",
                    f"{eager:.0%}" if checked else "-",
                )
            )
        headers = ("kind", "swapped", "proved", "wiring only", "failed", "refused", "worst error", "PyTorch's")
        return tabulate(lines, headers, disable_numparse=True) if lines else ""

    def _model_line(self) -> str:
        if self.model is None:
            return ""
        if self.model["problem"]:
            return f"whole model: {self.model['problem']}"
        line = f"whole model: largest difference {self.model['max_error']:.3g}, limit {self.model['limit']:.3g}"
        return line + ("" if self.model["passed"] else "; NOT WITHIN IT")

    def _lists(self) -> Iterable[str]:
        for status, title in (("failed", "did not match"), ("refused", "left alone")):
            groups: dict[tuple[str, str], list[str]] = {}
            for row in self.rows:
                if row["status"] == status:
                    put_back = "" if status == "refused" else "still swapped: " if row["swapped"] else "put back: "
                    groups.setdefault((put_back + row["reason"], row["cure"]), []).append(row["name"] or "(root)")
            for (reason, cure), names in groups.items():
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield f"{title}: {', '.join(names[:_SHOWN])}{more}: {reason}" + (f"; cure: {cure}" if cure else "")


def make_report(
    plan: Plan,
    proofs: Iterable[Any],
    swapped: Iterable[str],
    *,
    device: str,
    dtype: str,
    mode: str,
    kernels: str,
    model: Any = None,
) -> Report:
    """Put together what was planned, proved (SiteProof) and kept (names in ``swapped``)."""
    kept, rows = set(swapped), []
    for proof in proofs:
        rows.append({**asdict(proof), "swapped": proof.name in kept, "reason": proof.detail, "cure": ""})
    for refused in plan.refused:
        rows.append(
            {
                "name": refused.site.name,
                "kind": refused.refusal.kind,
                "status": "refused",
                "swapped": False,
                "reason": str(refused.refusal),
                "cure": refused.refusal.reason.cure,
            }
        )
    whole = None if model is None else {**asdict(model), "passed": model.passed}
    return Report(tuple(rows), device, dtype, mode, kernels, whole, tuple(_notes(rows)))


def _notes(rows: list[dict[str, Any]]) -> Iterable[str]:
    swapped = [row for row in rows if row["swapped"]]
    if not swapped:
        yield "nothing is swapped: the model is as it was"
        return
    if any(row["status"] == "wiring" for row in swapped):
        yield (
            "wiring only: weights, eps, shapes and modes match, but our kernel did not run (no CUDA tensor, or no "
            "library); prove it where it runs: normswap.validate(model, inputs)"
        )
    if any(row["status"] == "unchecked" for row in swapped):
        yield "unchecked: no proof was asked for, or none since the model was loaded; normswap.validate(model, inputs)"
    if any(row.get("inputs") == "synthesised" for row in swapped):
        yield "some sites were proved on made-up inputs; give example_inputs for a proof on the model's own"
    partial = [row["coverage"] for row in swapped if row.get("coverage", 1.0) < 1.0]
    if partial:
        yield f"large inputs were compared on slices of samples: at least {min(partial):.1%} of each"
    yield "error: share of the limit of half an ulp plus float32 rounding, against the original in float64"
    yield "undo: normswap.revert(model)"
