"""A report as a notebook shows it."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any


def page(report: Any) -> str:
    """A Report as HTML: a line, the table by kind, and what else there is to say, folded up."""
    statuses = Counter(row["status"] for row in report.rows if not row["swapped"])
    others = {"refused": "left alone", "slower": "put back", "failed": "rolled back"}
    told = [f"{others[status]}: {count}" for status, count in statuses.items()]
    summary = "; ".join(told) or "more"
    rest = "\n".join([report.remarks(), *report.notes])
    return (
        f"<p>{escape(report.headline())}</p>\n{report.table('html')}\n"
        f"<details><summary>{escape(summary)}</summary><pre>{escape(rest)}</pre></details>"
    )
