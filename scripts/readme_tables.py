"""Write the figures of README.md and of docs/, and the picture, from tests/gpu_record.json. Needs matplotlib.

python scripts/readme_tables.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import accuracy
import batch_norm_rows
import benchmark
import engines
import host_cost
import picture
import record as records
from record import Record, Row

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MORE = ROOT / "docs" / "benchmark.md"
TRAINING = ROOT / "docs" / "training.md"
BATCH_NORM = ROOT / "docs" / "batch_norm.md"
PICTURE = ROOT / "docs" / "benchmark.svg"
NOT_YET = "Not measured yet."
HOST_TARGETS = {"nn.LayerNorm": 1.15, "nn.RMSNorm": 1.15, "nn.GroupNorm": 1.0}
"""At most so many times what PyTorch's costs the host."""
STEP_TARGETS = {
    "resnet50_gn step": (20.0, "ms"),
    "vit_base step": (26.5, "ms"),
    "convnext_base step": (1.0, "eager"),
    "llama step": (0.77, "eager"),
    "resnet50 step": (0.75, "eager"),
}
"""At most so many milliseconds by default, or times the eager step's."""

IN_README = ("models", "steps", "checks")
IN_TRAINING = ("steps on", "steps", "step targets", "host targets")
IN_BATCH_NORM = ("batch norms on", "batch norms")
IN_MORE = (
    *("measured on", "summary", "benchmark", "host on", "host", "errors", "proof"),
    *("networks on", "networks summary", "networks", "backward on", "backward summary", "backward"),
)

FILES = {README: IN_README, MORE: IN_MORE, TRAINING: IN_TRAINING, BATCH_NORM: IN_BATCH_NORM}


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, line))} |" for line in (headers, *rows)]
    return "\n".join([lines[0], "|---" * len(headers) + "|", *lines[1:]])


def noted(known: Record, rows: Iterable[Row], of: Callable[[Row], Sequence[str]]) -> list[Row]:
    """The rows, each with a note where it is stale, and of its device where there are several."""
    rows, now = list(rows), engines.digests()
    several = len({known["stamps"][row["stamp"]]["device"] for row in rows}) > 1
    found = []
    for row in rows:
        words = [known["stamps"][row["stamp"]]["device"]] if several else []
        words += [records.AGAIN] if records.is_stale(known, row, of(row), now) else []
        found.append({**row, "note": ", ".join(words)})
    return found


def said_once(rows: list[Row]) -> tuple[list[Row], str]:
    """The rows, and what is said below their table instead of in each of several that are stale, which have a star
    where others are not."""
    stale = [records.AGAIN in row["note"] for row in rows]
    if sum(stale) < 2:
        return rows, ""
    mark, which = ("", "all of these are") if all(stale) else (r" \*", r"those with a star (\*) are")
    found = []
    for row, again in zip(rows, stale, strict=True):
        note = ", ".join(word for word in row["note"].split(", ") if word != records.AGAIN)
        found.append({**row, "note": note, "mark": mark if again else ""})
    return found, f"\n\nThe code has changed since: {which} {records.AGAIN}."


def first_cell(text: object, row: Row) -> str:
    return str(text) + row.get("mark", "") + (f" ({row['note']})" if row["note"] else "")


def measured_on(known: Record, rows: Sequence[Row]) -> str:
    """Where and when rows of the benchmark were measured, and how many of them are stale."""
    counts = Counter(row["stamp"] for row in rows)
    places = [f"{count} rows on {benchmark.where(known['stamps'][name])}" for name, count in counts.items()]
    stale = sum(records.AGAIN in row["note"] for row in rows)
    again = f" The kernels of {stale} of them have changed since; they are {records.AGAIN}." if stale else ""
    return f"{'; '.join(places)}.{again}" if places else NOT_YET


def benchmark_tables(known: Record, prefix: str, tags: set[str]) -> dict[str, str]:
    """Where the rows with one of ``tags`` were measured, what is to be said of them, and their table."""
    chosen = [row for row in known["benchmark"] if tags & set(row["tags"])]
    rows = noted(known, chosen, records.engines_of_row)
    names = benchmark.columns(rows)
    return {
        f"{prefix} on": measured_on(known, rows),
        f"{prefix} summary": " ".join(benchmark.told(benchmark.summary(rows))) if rows else NOT_YET,
        prefix: markdown(benchmark.headers(rows), [benchmark.cells(row, names) for row in rows]) if rows else NOT_YET,
    }


def tables(known: Record) -> dict[str, str]:
    """The text between the markers of each name."""
    own = benchmark_tables(known, "benchmark", {"headline", "common"})
    return {
        "measured on": own.pop("benchmark on"),
        "summary": own.pop("benchmark summary"),
        **own,
        **benchmark_tables(known, "networks", {"network"}),
        **benchmark_tables(known, "backward", {"backward"}),
        **batch_norm_tables(known),
        "host on": stamped(known, known["host"]),
        "host": host_table(known),
        "host targets": host_line(known),
        "models": models_table(known, False),
        "steps": models_table(known, True),
        "step targets": steps_line(known),
        "steps on": stamped(known, _models(known, True)),
        "errors": errors_table(known),
        "proof": proof_line(known["tests"]),
        "checks": checks_line(known),
    }


def batch_norm_tables(known: Record) -> dict[str, str]:
    """Where BatchNorm in training was measured, and a table for each dtype and its layout."""
    rows = noted(
        known, [row for row in known["benchmark"] if batch_norm_rows.TAG in row["tags"]], records.engines_of_row
    )
    shown = []
    for what in dict.fromkeys(row["what"] for row in rows):
        table = markdown(batch_norm_rows.headers(what), batch_norm_rows.lines(rows, what))
        shown.append(f"{table}\n\n{batch_norm_rows.told(rows, what)}.")
    return {"batch norms on": measured_on(known, rows), "batch norms": "\n\n".join(shown) or NOT_YET}


def host_table(known: Record) -> str:
    rows, below = said_once(noted(known, known["host"], engines.of_host))
    cells = [(first_cell(shown, row), *rest) for row in rows for shown, *rest in [host_cost.cells(row)]]
    return markdown(host_cost.HEADERS, cells) + below if cells else NOT_YET


def steps_line(known: Record) -> str:
    """What steps take by default beside what they may, and beside torch.compile's where that was timed."""
    found = []
    for row in _models(known, True):
        if row["model"] not in STEP_TARGETS:
            continue
        ms, (most, unit) = row["ms"], STEP_TARGETS[row["model"]]
        share = ms["default"] if unit == "ms" else ms["default"] / ms["eager"]
        beside = f", {ms['default'] / ms['compile']:.2f} of torch.compile's" if "compile" in ms else ""
        of = "ms" if unit == "ms" else "of eager"
        found.append(f"{row['model']} {share:.2f} {of} ({most:g}: {'met' if share <= most else '**missed**'}{beside})")
    return f"{'; '.join(found)}." if found else NOT_YET


def host_line(known: Record) -> str:
    """What calls that record gradients cost the host, in times of PyTorch's, beside what they may."""
    shares: dict[str, dict[str, float]] = {}
    for row in known["host"]:
        shares.setdefault(row["module"], {})[row["gradients"]] = row["normswap_us"] / row["eager_us"]
    found = []
    for name, most in HOST_TARGETS.items():
        forward, both = (shares.get(name, {}).get(what) for what in host_cost.GRADIENTS[1:])
        if forward is None or both is None:
            return NOT_YET
        told = "met" if max(forward, both) <= most else "**missed**"
        found.append(f"{name} {forward:.2f} and {both:.2f} ({told})")
    return f"{', '.join(found)}."


def stamped(known: Record, rows: Sequence[Row]) -> str:
    """On what devices rows were measured, with which PyTorch, when."""
    stamps = {row["stamp"]: known["stamps"][row["stamp"]] for row in rows}
    made = dict.fromkeys(f"{s['device']}, torch {s['torch']}, {s['date']}" for s in stamps.values())
    return f"{'; '.join(made)}." if made else NOT_YET


def _models(known: Record, training: bool) -> list[Row]:
    return [row for row in known["models"] if row.get("training", False) is training]


def models_table(known: Record, training: bool) -> str:
    """Milliseconds of whole models, or of steps of ``training``, a column for each way that one of them was run."""
    rows, below = said_once(noted(known, _models(known, training), engines.of_model))
    ways = dict.fromkeys(way for row in sorted(rows, key=lambda row: -len(row["ms"])) for way in row["ms"])
    cells = [
        (
            *(
                first_cell(row["model"], row),
                row["dtype"],
                f"{'-' if row['kept'] is None else row['kept']}/{row['swapped']}",
                (row.get("times") or {}).get("bound", "-"),
            ),
            *(f"{row['ms'][way]:.2f}" if way in row["ms"] else "-" for way in ways),
        )
        for row in rows
    ]
    return markdown(("model", "dtype", "swapped", "waits for", *ways), cells) + below if cells else NOT_YET


def errors_table(known: Record) -> str:
    rows = noted(known, known["errors"], records.engines_of_error)
    notes = {row["kind"]: row for row in rows if row["note"]}
    cells = [(first_cell(kind, notes[kind]) if kind in notes else kind, *rest) for kind, *rest in accuracy.cells(rows)]
    return markdown(accuracy.HEADERS, cells) if cells else NOT_YET


def proof_line(tests: dict[str, Row]) -> str:
    """What the tests of the proof told: false alarms, seconds, memory."""
    told = {test: figures for found in tests.values() for test, figures in found["told"].items()}

    def of(name: str) -> dict[str, dict[str, float]]:
        return {test: found for test, found in told.items() if name in found}

    alarms, costs, held = of("alarms"), of("peak_MB"), of("beyond_output_MB")
    if not (alarms and costs and held):
        return NOT_YET
    models, sites, wrong = (sum(found[name] for found in alarms.values()) for name in ("models", "sites", "alarms"))
    seconds = ", ".join(
        f"{found['seconds']:.2f} s in {test[test.index('[') + 1 : -1]}" for test, found in costs.items()
    )
    copied = max(found["peak_MB"] - found["model_MB"] for found in costs.values())
    return (
        f"Of {sites:,.0f} sites in {models:,.0f} random models (dtype and mode included) {wrong:.0f} were put back for "
        f"their error. `optimize()` of timm's vit_base, batch 8, proof and timing included: {seconds}, at most "
        f"{copied:,.0f} MB beyond the model and its copy. The proof of one large site held at most "
        f"{max(found['beyond_output_MB'] for found in held.values()):,.0f} MB beyond its output."
    )


def checks_line(known: Record) -> str:
    """How the tests on the GPU ended, in which files some failed or are to be run again, and compute-sanitizer."""
    now, tests = engines.digests(), known["tests"]
    told = "The tests on the GPU have not been recorded yet"
    if tests:
        passed, failing = (sum(found[outcome] for found in tests.values()) for outcome in ("passed", "failed"))
        failed = [name for name, found in tests.items() if found["failed"]]
        where = f" ({', '.join(f'`{name}`' for name in failed)})" if failed else ""
        told = f"On the GPU {passed} tests passed, {failing} failed{where}"
        stale = [name for name, found in tests.items() if records.is_stale(known, found, engines.of_tests(name), now)]
        if stale:
            told += f"; {len(stale)} of {len(tests)} files are to be run again after later changes"
        if new := {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")} - tests.keys():
            told += f"; no full run yet of {', '.join(sorted(new))}"
    if not known["sanitizer"]:
        return f"{told}; compute-sanitizer has not been run yet."
    tools = []
    for run in known["sanitizer"]:
        again = " (to be run again)" if records.is_stale(known, run, engines.KERNELS, now) else ""
        tools.append(f"{run['tool']} {'clean' if run.get('exit') == 0 else 'NOT CLEAN'}{again}")
    return (
        f"{told}; compute-sanitizer over every regime and path of the norms, forward and backward: {', '.join(tools)}."
    )


def filled(text: str, found: dict[str, str], names: Sequence[str]) -> str:
    """``text`` with the tables of these names. Raises ValueError where a marker is missing."""
    for name in names:
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no <!-- {name} --> ... <!-- /{name} -->")
        text = pattern.sub(lambda place, content=found[name]: place[1] + content + "\n" + place[2], text)
    return text


def main() -> None:
    known = records.load()
    found = tables(known)
    for file, names in FILES.items():
        file.write_text(filled(file.read_text(), found, names))
    picture.draw(known["benchmark"], PICTURE)


if __name__ == "__main__":
    main()
