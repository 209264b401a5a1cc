"""Each row of docs/tools.md: what the table declares of a tool is what is seen when it meets a swapped model."""

from __future__ import annotations

import pytest
import tool_rows
from tool_table import Row, params

assert tool_rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", params("cpu"))
def test_tool(row: Row) -> None:
    assert row.check("cpu") == row.declared
