"""A report as a notebook shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT = 320, 9, 170


def page(report: Any) -> str:
    """A Report as HTML: a line, the table by kind, and what else there is to say, folded up."""
    statuses = Counter(row["status"] for row in report.rows if not row["swapped"])
    others = {"refused": "left alone", "failed": "rolled back"}
    told = [f"{others.get(status, 'put back')}: {count}" for status, count in statuses.items()]
    summary = "; ".join(told) or "more"
    rest = "\n".join([report.remarks(), *report.notes])
    return (
        f"<p>{escape(report.headline())}</p>\n{report.table('html')}\n{plot(report.rows)}"
        f"<details><summary>{escape(summary)}</summary><pre>{escape(rest)}</pre></details>"
    )


def plot(rows: Iterable[Mapping[str, Any]]) -> str:
    """Two bars for each kind, as SVG: what its calls in one run of the model took where the model waits, before and
    after; "" where nothing was timed."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for row in rows:
        if row["swapped"] and row.get("gain") is not None:
            us = row["calls"] * row[f"eager_{row['bound']}_us"]
            before[row["kind"]] += us
            after[row["kind"]] += us / row["gain"]
    longest = max((*before.values(), *after.values()), default=0)
    if not longest:
        return ""
    bars = [(kind, us[kind], colour) for kind in before for us, colour in ((before, "#999"), (after, "#3a7"))]
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
