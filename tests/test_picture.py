"""The picture of the benchmark, drawn from the committed record."""

from __future__ import annotations

import copy
from pathlib import Path
from xml.etree import ElementTree

import picture
import record

ROOT = Path(__file__).resolve().parent.parent
ROWS = record.load()["benchmark"]


def test_drawn_twice_it_is_the_same_and_shows_every_row(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.svg", "other.svg")]
    for file in files:
        picture.draw(ROWS, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size < 200_000
    words = [element.text for element in ElementTree.parse(files[0]).iter() if element.tag.endswith("}text")]
    labels = [row["label"] for rows in picture.panels(ROWS).values() for row in rows]
    assert len(labels) == len([row for row in ROWS if {"headline", "common"} & set(row["tags"])]) and set(
        labels
    ) <= set(words)
    measured = {name for rows in picture.panels(ROWS).values() for row in rows for name in row["percent"]}
    assert {"normswap", "eager"} <= measured and {"target", *measured, *picture.panels(ROWS)} <= set(words)


def test_it_says_which_figures_it_shows(tmp_path: Path) -> None:
    picture.draw(ROWS, tmp_path / "drawn.svg")
    assert picture.shows(tmp_path / "drawn.svg") == picture.digest(ROWS)
    other = copy.deepcopy(ROWS)
    other[0]["ms"]["normswap"] *= 1.1
    assert picture.digest(other) != picture.digest(ROWS)
    assert picture.shows(tmp_path / "none.svg") == ""


def test_percents_of_the_floor() -> None:
    row = {"workload": "layer_norm", "shape": [8, 64], "what": "float16, channels_last", "mode": "eval"}
    row |= {"floor_ms": 1.0, "ms": {"eager": 4.0, "normswap": 1.25}, "target_ms": None, "tags": ["common"]}
    train = {**row, "workload": "linear_scale_batch_norm", "what": "float32, TF32", "mode": "train", "target_ms": 2.0}
    network = {**row, "tags": ["network", "llama"]}
    assert picture.panels([row, train, network]) == {
        "layer_norm": [{"label": "8x64 f16 nhwc", "percent": {"eager": 25.0, "normswap": 80.0}, "target": None}],
        "others": [
            {
                "label": "linear, scale, BN 8x64 f32 TF32 train",
                "percent": {"eager": 25.0, "normswap": 80.0},
                "target": 50.0,
            }
        ],
    }
