"""The benchmark's rows of BatchNorm in training as tables of docs/batch_norm.md: a line a shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from record import Row

TAG = "batch_norms"
CALLS = {
    f"{told}{way}": (workload, mode)
    for told, workload in (
        ("bn", "batch_norm"),
        ("bn, ReLU", "batch_norm + relu"),
        ("bn, add, ReLU", "batch_norm + add + relu"),
    )
    for way, mode in (("", "train"), (" and backward", "forward + backward"))
}
"""What a column is called, and which rows it has."""


def lines(rows: Iterable[Row], what: str) -> list[tuple[str, ...]]:
    """A line for each shape of the rows of ``what``, a dtype with its layout: MB, and for each of CALLS microseconds,
    the multiple of the passes and the multiple of PyTorch's time."""
    found = {(tuple(row["shape"]), row["workload"], row["mode"]): row for row in rows if row["what"] == what}
    shapes = dict.fromkeys(shape for shape, *_ in found)
    return [
        (
            "x".join(map(str, shape)),
            f"{math.prod(shape) * _size(what) / 1e6:.0f}",
            *(_cell(found.get((shape, *call))) for call in CALLS.values()),
        )
        for shape in shapes
    ]


def headers(what: str) -> Sequence[str]:
    return (what, "MB", *CALLS)


def told(rows: Sequence[Row], what: str) -> str:
    """How many rows of ``what`` over 16 MB are within 1.35 times the passes, and how many are slower than PyTorch's."""
    these = [row for row in rows if row["what"] == what]
    large = [row for row in these if math.prod(row["shape"]) * _size(what) > 16e6]
    within = sum(row["ms"]["normswap"] <= 1.35 * row["floor_ms"] for row in large)
    slower = sum(row["ms"]["normswap"] > row["ms"]["eager"] for row in these)
    return (
        f"{what}: {within} of {len(large)} within 1.35 times the passes, {slower} of {len(these)} slower than PyTorch's"
    )


def _size(what: str) -> int:
    return 4 if what.startswith("float32") else 2


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    ours, eager = row["ms"]["normswap"], row["ms"]["eager"]
    return f"{1e3 * ours:.0f}: {ours / row['floor_ms']:.2f}, {ours / eager:.2f}"
