"""tests/gpu_record.json: what was measured and tested on a GPU, each part with when, where and from which sources.

Parts are written as they end and merged with what is there; each names a stamp, which says the device, the versions,
the date and the digests of the engines (engines.py). A part is stale when an engine it depends on has changed since.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import engines

RECORD = Path(__file__).resolve().parent.parent / "tests" / "gpu_record.json"
AGAIN = "to be measured again"

Row = dict[str, Any]
Record = dict[str, Any]

_writing = threading.Lock()


def empty() -> Record:
    return {"stamps": {}, "benchmark": [], "host": [], "models": [], "errors": [], "tests": {}, "sanitizer": []}


def load(path: Path = RECORD) -> Record:
    return {**empty(), **json.loads(path.read_text())} if path.is_file() else empty()


def stamp(record: Record, made: dict[str, Any]) -> str:
    """The name of a stamp that says what ``made`` does, which is now in the record."""
    name = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:8]
    record["stamps"][name] = dict(made)
    return name


def is_stale(record: Record, part: Row, of: Iterable[str], now: dict[str, str]) -> bool:
    """Whether one of the engines ``of`` is another than when ``part`` was made."""
    then = record["stamps"][part["stamp"]]["sources"]
    return any(then.get(engine) != now[engine] for engine in of)


def merged(
    earlier: Sequence[Row], new: Sequence[Row], key: Callable[[Row], object], order: Sequence[object] | None = None
) -> list[Row]:
    """The new rows in the place of earlier ones of the same key. With ``order``, sorted by it and without others."""
    found = {key(row): row for row in (*earlier, *new)}
    return list(found.values()) if order is None else [found[name] for name in order if name in found]


def save(record: Record, path: Path = RECORD) -> None:
    """Write the record, whole or not at all, without the stamps that nothing names any more."""
    parts = [*(row for name in ("benchmark", "host", "models", "errors", "sanitizer") for row in record[name])]
    used = {part["stamp"] for part in (*parts, *record["tests"].values())}
    record["stamps"] = {name: made for name, made in record["stamps"].items() if name in used}
    with _writing, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.write_text(json.dumps(record, indent=1) + "\n")
        written.replace(path)


# --- what each part depends on, and is known by -----------------------------------------------------------------------


def engines_of_row(row: Row) -> tuple[str, ...]:
    """Of a benchmarked row."""
    words = row["workload"].split()
    return engines.of_row(
        words[0],
        channels_last="channels_last" in row["what"],
        over_channels="over channels" in row["workload"],
        backward="backward" in row["mode"],
    )


def engines_of_error(row: Row) -> tuple[str, ...]:
    """Of a row of the accuracy sweep, whose ``regime`` may name another path."""
    regime = row["regime"]
    return engines.of_row(row["kind"], channels_last=regime == "channels_last", over_channels=regime == "over channels")


def key_of_row(row: Row) -> tuple[object, ...]:
    return row["workload"], tuple(row["shape"]), row["what"], row["mode"]


def key_of_error(row: Row) -> tuple[object, ...]:
    return row["kind"], row["regime"], row["dtype"], row["mean"]
