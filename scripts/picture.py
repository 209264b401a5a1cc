"""The benchmark as a picture: percent of the floor by size, a panel a norm, targets marked. Needs matplotlib.

Drawn from the same figures it is the same file; the digest of what it shows stands in it, so that a test without
matplotlib sees whether it is the record's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PANELS = ("layer_norm", "rms_norm", "group_norm", "others")
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "channels_last": "nhwc"}
# name: (colour, marker, size), drawn in this order
STYLES = {
    "eager": ("#9aa0a6", "o", 5),
    "torch.compile": ("#e69f00", "s", 5),
    "Liger": ("#cc79a7", "v", 5),
    "quack": ("#009e73", "^", 5),
    "normswap": ("#0057b7", "D", 6),
}
ROW_INCHES, WIDTH = 0.2, 11.0


def panels(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What is shown of the headline and common rows: for each panel, by size, a label with percents of the floor by
    name and the target's."""
    shown: dict[str, list[Row]] = {name: [] for name in PANELS}
    chosen = [row for row in rows if {"headline", "common"} & set(row["tags"])]
    for row in sorted(chosen, key=lambda row: row["floor_ms"]):
        kind = row["workload"].split()[0]
        percent = {name: _percent(row, ms) for name, ms in row["ms"].items() if name in STYLES}
        target = None if row["target_ms"] is None else _percent(row, row["target_ms"])
        panel = kind if kind in PANELS and "over" not in row["workload"] else PANELS[-1]
        shown[panel].append({"label": _label(row, panel), "percent": percent, "target": target})
    return {name: rows for name, rows in shown.items() if rows}


def _percent(row: dict[str, Any], ms: float) -> float:
    return round(100 * row["floor_ms"] / ms, 1)


def _label(row: dict[str, Any], panel: str) -> str:
    what = " ".join(SHORT.get(word, word) for word in row["what"].split(", "))
    name = row["workload"].removeprefix(panel).replace("linear_scale_batch_norm", "linear, scale, BN").strip(" +")
    train = "train" if row["mode"] == "train" else ""
    return " ".join(word for word in (name, "x".join(map(str, row["shape"])), what, train) if word)


def digest(rows: Iterable[Row]) -> str:
    """What names the figures shown."""
    return hashlib.sha256(json.dumps(panels(rows)).encode()).hexdigest()[:16]


def shows(picture: Path) -> str:
    """The digest that stands in a picture, "" where there is none."""
    text = picture.read_text() if picture.is_file() else ""
    return text.partition("figures ")[2].partition("<")[0]


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Write ``picture``, an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = panels(rows)
    inches = {name: ROW_INCHES * len(rows) for name, rows in shown.items()}
    height = sum(inches.values()) + 0.45 * len(shown) + 0.9
    with matplotlib.rc_context({"svg.hashsalt": "normswap", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_facecolor("white")
        top = height - 0.75
        names = [name for name in STYLES if any(name in row["ms"] for row in rows)]
        for name, group in shown.items():
            axes = figure.add_axes((0.3, (top - inches[name]) / height, 0.67, inches[name] / height))
            _panel(axes, name, group, names)
            top -= inches[name] + 0.45
        axes.set_xlabel("percent of the floor")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncol=len(labels), frameon=False)
        metadata = {"Date": None, "Creator": "normswap", "Description": f"figures {digest(rows)}"}
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="svg", metadata=metadata)


def _panel(axes: Any, title: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    for name in names:
        colour, marker, size = STYLES[name]
        points = [(row["percent"][name], y) for y, row in enumerate(rows) if name in row["percent"]]
        axes.plot([x for x, _ in points], [y for _, y in points], marker, color=colour, ms=size, label=name)
    aimed = [(row["target"], y) for y, row in enumerate(rows) if row["target"] is not None]
    axes.plot([x for x, _ in aimed], [y for _, y in aimed], "|", color="black", ms=12, mew=1.5, label="target")
    axes.set_title(title, loc="left", fontweight="bold", pad=3)
    axes.set_xlim(0, max(105, 5 + max(percent for row in rows for percent in row["percent"].values())))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.grid(alpha=0.3)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
