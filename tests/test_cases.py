"""Every case has a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cases import CASES, OUT_OF_SCOPE

TESTS = Path(__file__).resolve().parent


def marked() -> Iterator[tuple[str, str]]:
    """(file, id) of every ``pytest.mark.case(...)`` in the tests, read from their source."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                yield from ((path.name, ast.literal_eval(argument)) for argument in node.args)


def test_every_case_has_a_test() -> None:
    assert sorted(CASES.keys() - OUT_OF_SCOPE.keys() - {case for _, case in marked()}) == []


def test_every_mark_is_a_case() -> None:
    assert [(name, case) for name, case in marked() if case not in CASES] == []


def test_out_of_scope_is_a_case_without_a_test() -> None:
    assert OUT_OF_SCOPE.keys() <= CASES.keys()
    assert not OUT_OF_SCOPE.keys() & {case for _, case in marked()}
