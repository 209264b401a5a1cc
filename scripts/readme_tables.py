"""Write README's figures and the picture from tests/gpu_record.json. Needs matplotlib.

python scripts/readme_tables.py
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import accuracy
import benchmark
import picture
from check_models import WAYS

from normswap import builder, native

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "benchmark.svg"
NOT_YET = "Not measured with these kernels yet."
OLDER = "\nThe kernels have changed since; they are to be measured again."


def kernel_digest() -> str:
    """What names the kernel sources in a record."""
    return hashlib.sha256(b"".join(f.read_bytes() for f in builder.sources(native.source_dir()))).hexdigest()[:16]


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, line))} |" for line in (headers, *rows)]
    return "\n".join([lines[0], "|---" * len(headers) + "|", *lines[1:]])


def tables(record: dict[str, Any]) -> dict[str, str]:
    """The text between the markers of each name in README."""
    found = record["benchmark"]
    names = benchmark.columns(found["rows"])
    models = [
        (r["model"], r["dtype"], r["swapped"], *(f"{r['ms'][way]:.2f}" if way in r["ms"] else "-" for way in WAYS))
        for r in record.get("models", ())
    ]
    peers = "".join(f", {name} {version}" for name, version in found["peers"].items())
    return {
        "measured on": f"One {found['device']}, torch {found['torch']}{peers}, {found['date']}; the copy rate is "
        f"{found['copy_GB_per_s']:.0f} GB/s.{'' if found['kernel_sources'] == kernel_digest() else OLDER}",
        "summary": " ".join(benchmark.told(found["summary"])),
        "benchmark": markdown(benchmark.headers(found["rows"]), [benchmark.cells(row, names) for row in found["rows"]]),
        "host": markdown(benchmark.HOST_HEADERS, [benchmark.host_cells(row) for row in found["host"]]),
        "models": markdown(("model", "dtype", "swapped", *WAYS), models) if models else NOT_YET,
        "errors": markdown(accuracy.HEADERS, accuracy.cells(record["errors"])) if "errors" in record else NOT_YET,
        "proof": proof_line(record.get("proof", {})),
        "checks": checks_line(record.get("tests"), record.get("sanitizer")),
    }


def proof_line(told: dict[str, dict[str, float]]) -> str:
    """What the tests of the proof told: false alarms, seconds, memory."""

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


def checks_line(tests: dict[str, Any] | None, sanitizer: list[dict[str, Any]] | None) -> str:
    """How the tests on the GPU ended, in which files some failed, and compute-sanitizer."""
    told = "The tests on the GPU have not been recorded with these kernels yet"
    if tests is not None:
        failed = [name for name, found in tests["files"].items() if found["failed"]]
        where = f" ({', '.join(f'`{name}`' for name in failed)})" if failed else ""
        told = f"On the GPU {tests['passed']} tests passed, {tests['failed']} failed{where}"
        if unfinished := tests.get("unfinished"):
            told += f", {len(unfinished)} files did not end ({', '.join(f'`{name}`' for name in unfinished)})"
    if sanitizer is None:
        return f"{told}; compute-sanitizer has not been run over these kernels yet."
    tools = ", ".join(f"{run['tool']} {'clean' if run.get('exit') == 0 else 'NOT CLEAN'}" for run in sanitizer)
    return f"{told}; compute-sanitizer over every regime and path, forward and backward: {tools}."


def filled(text: str, record: dict[str, Any]) -> str:
    """``text`` with every table as the record has it. Raises ValueError where a marker is missing."""
    for name, content in tables(record).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README has no <!-- {name} --> ... <!-- /{name} -->")
        text = pattern.sub(lambda found, content=content: found[1] + content + "\n" + found[2], text)
    return text


def main() -> None:
    record = json.loads((ROOT / "tests" / "gpu_record.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(), record))
    picture.draw(record["benchmark"], PICTURE)


if __name__ == "__main__":
    main()
