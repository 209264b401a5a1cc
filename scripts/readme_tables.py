"""Write README's tables from tests/gpu_record.json.

python scripts/readme_tables.py
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import benchmark

from normswap import builder, native

ROOT = Path(__file__).resolve().parent.parent
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
    host = [(r["module"], f"{r['eager_us']:.1f}", f"{r['normswap_us']:.1f}") for r in found["host"]]
    models = [
        (r["model"], r["dtype"], r["swapped"], f"{r['eager_ms']:.2f}", f"{r['normswap_ms']:.2f}")
        for r in record["models"]
    ]
    return {
        "measured on": f"One {record['device']}, torch {record['torch']}, {record['date']}; the copy rate is "
        f"{found['copy_GB_per_s']:.0f} GB/s.{'' if record['kernel_sources'] == kernel_digest() else OLDER}",
        "benchmark": markdown(benchmark.HEADERS, [benchmark.cells(row) for row in found["rows"]]),
        "host": markdown(("module", "eager", "normswap"), host),
        "models": markdown(("model", "dtype", "swapped", "eager ms", "normswap ms"), models),
    }


def filled(text: str, record: dict[str, Any]) -> str:
    """``text`` with every table as the record has it. Raises ValueError where a marker is missing."""
    for name, content in tables(record).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README has no <!-- {name} --> ... <!-- /{name} -->")
        text = pattern.sub(lambda found, content=content: found[1] + content + found[2], text)
    return text


def main() -> None:
    record = json.loads((ROOT / "tests" / "gpu_record.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(), record))


if __name__ == "__main__":
    main()
