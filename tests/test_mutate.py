"""Mutations of conditions: what is made of a source, and which tests notice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import mutate
import mutations
import pytest

ROOT = Path(__file__).resolve().parent.parent

SOURCE = '''
def small(x, items):
    """Grüße before a condition, which are more bytes than letters."""
    if not items or x < 3 and x is not None:
        return "é" if x else "b"
    return all(item for item in items if item > x)
'''


def found() -> dict[str, list[str]]:
    """What becomes of each condition of SOURCE."""
    by_old: dict[str, list[str]] = {}
    for one in mutations.mutations("small.py", SOURCE):
        by_old.setdefault(one.old, []).append(one.new)
    return by_old


def test_each_condition_is_dropped_or_weakened() -> None:
    assert found() == {
        "not items or x < 3 and x is not None": ["(False)", "(True)", "(not items)", "(x < 3 and x is not None)"],
        "not items": ["(items)"],
        "x < 3 and x is not None": ["(x < 3)", "(x is not None)"],
        "x < 3": ["(x <= 3)"],
        "x": ["(False)", "(True)"],
        "all(item for item in items if item > x)": ["(False)", "(True)"],
        "item > x": ["(True)", "(item >= x)"],
    }


def test_what_stands_around_a_condition_stays() -> None:
    for one in mutations.mutations("small.py", SOURCE):
        text, new = one.applied(SOURCE), f"({one.new} if True else ({one.old}))"
        assert any(text == SOURCE[:at] + new + SOURCE[at + len(one.old) :] for at in range(len(SOURCE))), one
        compile(text, "small.py", "exec")
        assert text.splitlines()[one.line - 1] != SOURCE.splitlines()[one.line - 1]


def test_what_changes_nothing_is_there_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(mutations.EQUIVALENT)
    monkeypatch.setattr(mutations, "EQUIVALENT", {})
    for path, old, new in known:
        source = (ROOT / "normswap" / path).read_text()
        made = [(" ".join(one.old.split()), one.new) for one in mutations.mutations(f"normswap/{path}", source)]
        assert (old, new) in made, (path, old)
    monkeypatch.setattr(mutations, "EQUIVALENT", {("small.py", "x", "(True)"): "why"})
    assert found()["x"] == ["(False)"]


RULES = """
LIMIT = 10 if __name__ else 0


def wide(x):
    return x > LIMIT


def count(x):
    def down():
        while True:
            x[0] -= 1
            if x[0] == 0:
                return x
    return down()


def refused(x, hooks):
    if hooks:
        return "hooks"
    if x is None:
        return "none"
    return ""
"""

TESTS = """
from normswap.rules import count, refused, wide


def test_hooks():
    assert refused(1, True) == "hooks" and refused(1, False) == ""


def test_wide():
    assert wide(11) and not wide(9)


def test_count():
    assert count([3]) == [0]


def test_of_this_place_only():
    assert False
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {"normswap/__init__.py": "", "normswap/rules.py": RULES, "tests/test_rules.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutated(project: Path) -> subprocess.CompletedProcess[str]:
    code = "import mutate, pathlib, sys; mutate.GRACE = 1; mutate.main(pathlib.Path(sys.argv.pop(1)))"
    command = [sys.executable, "-c", code, str(project), "rules.py", "--jobs", "2"]
    return subprocess.run(command, cwd=ROOT / "scripts", text=True, capture_output=True, check=False)


def test_a_condition_that_no_test_asks_for_survives(project: Path) -> None:
    done = mutated(project)
    assert done.returncode == 1, done.stderr
    assert "left out, failing without any mutation: tests/test_rules.py::test_of_this_place_only" in done.stderr
    *tried, none, name, greater, number = done.stdout.splitlines()
    assert name == "survived  normswap/rules.py:2: __name__  ->  (True)  (3 of 3 tests)"
    assert greater == "survived  normswap/rules.py:6: x > LIMIT  ->  (x >= LIMIT)  (1 of 1 tests)"
    assert none == "survived  normswap/rules.py:21: x is None  ->  (False)  (1 of 1 tests)"
    assert number == "9 of 12 killed" and len(tried) == 12
    for killed in (
        "rules.py:19: hooks  ->  (False)  tests/test_rules.py::test_hooks",
        "rules.py:2: __name__  ->  (False)  tests/test_rules.py::test_wide",
        "rules.py:13: x[0] == 0  ->  (False)  that they did not end",
    ):
        assert f"killed    normswap/{killed}" in tried
    assert (project / "normswap/rules.py").read_text() == RULES
    again = mutated(project)
    assert sorted(again.stdout.splitlines()) == sorted(done.stdout.splitlines()) and again.stderr == ""


def test_a_run_that_does_not_end_is_ended() -> None:
    assert mutate.forked(lambda: 3) == 3
    assert mutate.forked(lambda: time.sleep(600), 0.2) is None and mutate.forked(lambda: os._exit(3)) is None


def test_the_real_files_are_all_mutated() -> None:
    listed = subprocess.run(
        [sys.executable, "scripts/mutate.py", "--list", "--sample", "30", "--seed", "1"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.splitlines()
    assert (
        len(listed) == 31 and listed[-1] == "30 mutations" and all(line.startswith("normswap/") for line in listed[:-1])
    )
    for path in mutations.files([], ROOT):
        assert path.startswith("normswap/") and (ROOT / path).is_file()
    with pytest.raises(SystemExit, match="no such file in normswap/: nothing.py"):
        mutations.files(["nothing.py"], ROOT)
