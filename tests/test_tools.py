"""Each row of docs/tools.md: what the table declares of a tool is what is seen when it meets a swapped model."""

from __future__ import annotations

import pytest
import tool_libraries
import tool_rows
import tools_table
from tool_table import IN_ORDER, ORIGINAL, REFUSED, ROWS, WORKS, Row, params

assert tool_rows and tool_libraries


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", params("cpu"))
def test_tool(row: Row) -> None:
    assert row.check("cpu") == row.declared


def test_the_table_in_docs_is_the_declared_one() -> None:
    text = tools_table.FILE.read_text()
    assert tools_table.filled(text) == text, "run PYTHONPATH=tests python scripts/tools_table.py"
    assert {row.declared.verdict for row in ROWS} <= {WORKS, IN_ORDER, ORIGINAL, REFUSED}
    assert len({row.name for row in ROWS}) == len(ROWS)
