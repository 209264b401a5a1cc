"""What optimize() did and proved, for a person and for a program."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

from tabulate import tabulate

from normswap.plans import REGION, Plan, Refusal, Swap, listed

_SHOWN = 5
_WIDTH, _HEIGHT, _LEFT = 320, 9, 170


@dataclass(frozen=True, repr=False)
class Report:
    """``rows`` has a dict a site: name, kind, status ("proved", "wiring", "failed", "unchecked", "slower",
    "declined", "identity" or "refused"), swapped, and of what is not swapped code (the name of a ``plan.Reason``),
    reason and cure; for what was planned also inputs, mode, dtype, device, error_share, eager_error_share, gradients,
    coverage, detail; for what was timed also calls (in one run of the model), eager_device_us, ours_device_us,
    eager_host_us, ours_host_us (microseconds a call), bound (what the model waits for, "device" or "host") and gain
    (there; 1 within the noise).

    ``times`` has what was measured of the whole model: before_ms, after_ms, bound, device_ms, host_ms, training.
    ``plan`` holds what is swapped now and what was refused, put back included: ``normswap.apply`` replays it.
    """

    rows: tuple[dict[str, Any], ...]
    device: str
    dtype: str
    mode: str
    kernels: str
    model: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    plan: Plan = field(default_factory=Plan)
    times: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**vars(self), "plan": self.plan.to_dict()}

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the sites that are swapped now."""
        return tuple(row["name"] for row in self.rows if row["swapped"])

    def headline(self) -> str:
        """How many sites are swapped, where, and by which kernels."""
        return (
            f"{len(self.swapped)} of {len(self.rows)} sites swapped on {self.device}, {self.dtype}, "
            f"{self.mode} mode; kernels: {self.kernels}"
        )

    def __repr__(self) -> str:
        return f"<normswap.Report: {self.headline().partition('; kernels')[0]}>"

    def _repr_html_(self) -> str:
        return _page(self)

    def __str__(self) -> str:
        parts = [f"normswap: {self.headline()}", self.table(), self.remarks(), *self.notes]
        return "\n".join(part for part in parts if part)

    def remarks(self) -> str:
        """What is to be said of the run's time, the whole model and what is not swapped."""
        return "\n".join(part for part in (self._time_line(), self._model_line(), *self._lists()) if part)

    def table(self, form: str = "simple") -> str:
        """A line for each kind of site, in a format of tabulate's."""
        kinds = sorted(dict.fromkeys(row["kind"] for row in self.rows), key=lambda kind: kind == REGION)
        of_kind = {kind: [row for row in self.rows if row["kind"] == kind] for kind in kinds}
        headers = ("kind", "sites", "swapped", "proved", "error", "PyTorch's", *(_TIMES if _timed(self.rows) else ()))
        lines = [_line(kind, rows)[: len(headers)] for kind, rows in of_kind.items()]
        right = ("left", *("right",) * (len(headers) - 1))
        return str(tabulate(lines, headers, form, disable_numparse=True, colalign=right)) if lines else ""

    def _time_line(self) -> str:
        if self.times is None:
            return ""
        before, after = (f"{self.times[name]:.3g} ms {name[:-3]}" for name in ("before_ms", "after_ms"))
        what = "forward and backward" if self.times["training"] else "forward"
        return f"the model on these inputs, {what}: {before}, {after} (waits for its {self.times['bound']})"

    def _model_line(self) -> str:
        if self.model is None:
            return ""
        if self.model["problem"]:
            return f"whole model: {self.model['problem']}"
        line = f"whole model: largest difference {self.model['max_error']:.3g}, limit {self.model['limit']:.3g}"
        return line + ("" if self.model["passed"] else "; NOT WITHIN IT")

    def _lists(self) -> Iterable[str]:
        groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
        for row in _left_out(self.rows):
            groups.setdefault((_title(row), row["reason"], row["cure"]), []).append(row)
        for (title, reason, cure), rows in groups.items():
            told = listed([row["name"] or "(root)" for row in rows], _SHOWN)
            yield f"{title}: {told}: {reason}{_figures(rows)}" + (f"; cure: {cure}" if cure else "")
        for reason, names in self._apart().items():
            yield f"norm apart: {listed(names, _SHOWN)}: {reason}"

    def _apart(self) -> dict[str, list[str]]:
        """The norms of regions by why the convolution or Linear before them is no part."""
        found: dict[str, list[str]] = {}
        for swap in self.plan.swaps:
            for region in swap.match.attributes.get("regions", ()):
                if region.get("apart"):
                    found.setdefault(region["apart"], []).append(f"{swap.site.name}.{region['norm']}".lstrip("."))
        return found


def _line(kind: str, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """A kind's row of the table; times are means of the calls of what is swapped."""
    checked = [row for row in rows if row["swapped"] and row["status"] in ("proved", "wiring")]
    return (
        kind,
        len(rows),
        sum(row["swapped"] for row in rows),
        sum(row["swapped"] and row["status"] == "proved" for row in rows),
        f"{max(row['error_share'] for row in checked):.0%}" if checked else "-",
        f"{max(row['eager_error_share'] for row in checked):.0%}" if checked else "-",
        *_times(_timed(rows)),
    )


_TIMES = ("device us", "ours", "host us", "ours", "gain")


def _times(timed: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    if not timed:
        return ("-",) * len(_TIMES)
    calls = sum(row["calls"] for row in timed)
    names = ("eager_device_us", "ours_device_us", "eager_host_us", "ours_host_us")
    means = (sum(row["calls"] * row[name] for row in timed) / calls for name in names)
    before, after = _run_us(timed)
    return (*(f"{mean:.1f}" for mean in means), f"{before / after:.2f}x" if after else "-")


def _run_us(timed: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """What the calls in one run of the model took where it waits, before and after."""
    times = [(row["calls"] * row[f"eager_{row['bound']}_us"], row["gain"]) for row in timed]
    return sum(us for us, _ in times), sum(us / gain for us, gain in times)


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """What sites took that were put back, of the device and of the host."""
    timed = [row for row in rows if row["status"] == "slower" and row.get("gain") is not None]
    if not timed:
        return ""
    device, ours_device, host, ours_host, _ = _times(timed)
    return f": device {device} -> {ours_device} us a call, host {host} -> {ours_host}"


def _timed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The swapped sites that were timed."""
    return [row for row in rows if row["swapped"] and row.get("gain") is not None]


_TITLES = ("rolled back", "failed, still swapped", "put back", "left alone")


def _title(row: Mapping[str, Any]) -> str:
    """What became of a site of which a reason is to be told; "" of the others."""
    if row["status"] == "failed":
        return "failed, still swapped" if row["swapped"] else "rolled back"
    became = {"slower": "put back", "declined": "put back", "identity": "put back", "refused": "left alone"}
    return became.get(row["status"], "")


def _left_out(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that have a title, in the order of these."""
    return sorted((row for row in rows if _title(row)), key=lambda row: _TITLES.index(_title(row)))


def rows_of(
    plan: Plan, proofs: Iterable[Any], swapped: Collection[str], timed: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of what was proved (SiteProof), timed (rows by name) and is ``swapped`` now, and of what was refused, in
    ``plan`` as it stands after sites were put back: those are among its refused."""
    refusals = {refused.site.name: refused.refusal for refused in plan.refused}
    rows = [
        _row(proof, proof.name in swapped, refusals.pop(proof.name, None), timed.get(proof.name)) for proof in proofs
    ]
    for name, refusal in refusals.items():
        rows.append({"name": name, "kind": refusal.kind, "status": "refused", "swapped": False, **_why(refusal)})
    return rows


def merged(earlier: Report, later: Report, already: Sequence[Swap], order: Sequence[str]) -> Report:
    """Of a model that was swapped when it was optimized: ``later`` with the sites that were swapped ``already``, as
    ``earlier`` has them, and what that left alone and ``later`` does not speak of; all in the ``order`` of the modules'
    names."""
    place = {name: index for index, name in enumerate(order)}
    told = {row["name"] for row in later.rows}
    kept = {swap.site.name for swap in already} - told
    left = {refused.site.name for refused in earlier.plan.refused} - kept - told
    rows = [*later.rows, *(row for row in earlier.rows if row["name"] in kept | left and row["name"] in place)]
    rows.sort(key=lambda row: place.get(row["name"], len(place)))
    swaps = {swap.site.name: swap for swap in (*already, *earlier.plan.swaps) if swap.site.name in kept}
    plan = Plan(
        tuple(sorted((*swaps.values(), *later.plan.swaps), key=lambda swap: place[swap.site.name])),
        (*later.plan.refused, *(refused for refused in earlier.plan.refused if refused.site.name in left & {*place})),
        later.plan.gpu or earlier.plan.gpu,
    )
    model = earlier.model if later.model is None else later.model
    return replace(later, rows=tuple(rows), plan=plan, notes=tuple(notes_on(rows)), model=model)


def _row(proof: Any, swapped: bool, refusal: Refusal | None, timed: Mapping[str, Any] | None) -> dict[str, Any]:
    row = {**asdict(proof), "swapped": swapped, "code": "", "reason": proof.detail, "cure": ""}
    del row["declined"]
    if refusal is not None:
        row |= _why(refusal)
        if row["status"] != "failed":
            row["status"] = refusal.reason.name.lower()
    if timed is not None:
        row |= {name: value for name, value in timed.items() if name != "note"}
        row["detail"] = "; ".join(told for told in (row["detail"], timed["note"]) if told)
    return row


def _why(refusal: Refusal) -> dict[str, str]:
    return {"code": refusal.reason.name, "reason": str(refusal), "cure": refusal.reason.cure}


def notes_on(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """What a person should know about the rows of a report."""
    swapped = [row for row in rows if row["swapped"]]
    if not swapped:
        yield "nothing is swapped: the model is as it was"
        return
    unproved = Counter(_why_unproved(row) for row in swapped if row["status"] in _UNPROVED)
    for why, count in unproved.items():
        yield f"unproved: {count} of {len(swapped)}: {why}; cure: normswap.validate(model, inputs)"
    made_up = sum(row.get("inputs") == "synthesised" for row in swapped)
    if made_up:
        yield f"made-up inputs: {made_up} of {len(swapped)}; cure: give example_inputs that reach them"
    partial = [row["coverage"] for row in swapped if row.get("coverage", 1.0) < 1.0]
    if partial:
        yield f"large inputs were compared on slices of samples: at least {min(partial):.1%} of each"
    if any("gain" in row and row["gain"] is None for row in swapped):
        yield "some sites could not be timed; see their rows"
    if any(row["status"] == "proved" for row in swapped):
        yield (
            "the proof covers these inputs' dtypes and shapes, this device and mode; for others: "
            "normswap.validate(model, inputs)"
        )
    yield "error: the worst, as a share of its limit: half an ulp plus float32 rounding, from the original in float64"
    if timed := _timed(rows):
        yield "us: microseconds a call on the shapes seen, PyTorch's and ours; gain: where the model waits"
        if same := sum(row["gain"] == 1.0 for row in timed):
            yield f"as fast as before, up to the noise, and kept: {same} of {len(timed)} swapped sites that were timed"
    yield "undo: normswap.revert(model); for a block: with normswap.disabled(model)"


def _why_unproved(row: Mapping[str, Any]) -> str:
    told = row.get("detail") if row["status"] == "unchecked" else ""
    return told or _UNPROVED[row["status"]]


_UNPROVED = {
    "wiring": "wiring only: weights, eps, shapes and modes match, but our kernel did not run (no CUDA tensor, or no "
    "library): prove it where it runs",
    "unchecked": "no proof was asked for, or none since the model was loaded",
}


# --- as a notebook shows it ------------------------------------------------------------------------------------------


def _page(report: Report) -> str:
    """A Report as HTML: a line, the table by kind, and what else there is to say, folded up."""
    counts = Counter(map(_title, _left_out(report.rows)))
    summary = "; ".join(f"{title}: {count}" for title, count in counts.items()) or "more"
    rest = "\n".join([report.remarks(), *report.notes])
    return (
        f"<p>{escape(report.headline())}</p>\n{report.table('html')}\n{_plot(report.rows)}"
        f"<details><summary>{escape(summary)}</summary><pre>{escape(rest)}</pre></details>"
    )


def _plot(rows: Iterable[Mapping[str, Any]]) -> str:
    """Two bars for each kind, as SVG: what its calls in one run of the model took where the model waits, before and
    after; "" where nothing was timed."""
    timed = _timed(rows)
    kinds = dict.fromkeys(row["kind"] for row in timed)
    times = {kind: _run_us(row for row in timed if row["kind"] == kind) for kind in kinds}
    longest = max((us for both in times.values() for us in both), default=0)
    if not longest:
        return ""
    bars = [(kind, *bar) for kind, both in times.items() for bar in zip(both, ("#999", "#3a7"), strict=True)]
    lines = [_bar(line, *bar, longest) for line, bar in enumerate(bars)]
    height = len(bars) * (_HEIGHT + 6)
    return f'<svg width="{_LEFT + _WIDTH + 90}" height="{height}" font-size="10">{"".join(lines)}</svg>\n'


def _bar(line: int, kind: str, us: float, colour: str, longest: float) -> str:
    top, name = line * (_HEIGHT + 6), f"{kind}, {'after' if line % 2 else 'before'}"
    width = _WIDTH * us / longest
    return (
        f'<text x="0" y="{top + _HEIGHT}">{escape(name)}</text>'
        f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}"/>'
        f'<text x="{_LEFT + width + 4:.1f}" y="{top + _HEIGHT}">{us:.1f} us</text>'
    )
