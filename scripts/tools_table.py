"""Write the table of docs/tools.md from the rows that the tests declare.

PYTHONPATH=tests python scripts/tools_table.py
"""

from __future__ import annotations

from pathlib import Path

import readme_tables
import tool_libraries
import tool_rows
from tool_table import ROWS, Row

assert tool_rows and tool_libraries
FILE = Path(__file__).resolve().parent.parent / "docs" / "tools.md"


def cells(row: Row) -> tuple[str, ...]:
    where = ", ".join({"cpu": "CPU", "cuda": "GPU"}[device] for device in row.devices)
    return (f"`{row.tool}`", row.calls, row.declared.verdict, row.declared.text, where)


def table() -> str:
    headers = ("tool", "calls, in this order", "what happens", "the other way round", "tested on")
    rows = sorted(ROWS, key=lambda row: row.check.__module__ != "tool_rows")  # PyTorch's own first
    return readme_tables.markdown(headers, map(cells, rows))


def filled(text: str) -> str:
    return readme_tables.filled(text, {"tools": table()}, ("tools",))


if __name__ == "__main__":
    FILE.write_text(filled(FILE.read_text()))
