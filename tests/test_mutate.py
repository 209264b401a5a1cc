"""Mutations of conditions: what is made of a source, and which tests notice."""

from __future__ import annotations

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
        text = one.applied(SOURCE.encode()).decode()
        assert any(text == SOURCE[:at] + one.new + SOURCE[at + len(one.old) :] for at in range(len(SOURCE))), one
        compile(text, "small.py", "exec")
        assert text.splitlines()[one.line - 1] != SOURCE.splitlines()[one.line - 1]
    with pytest.raises(ValueError, match="has changed"):
        mutations.mutations("small.py", SOURCE)[0].applied(b"another text that is long enough " * 9)


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
def wide(x):
    return x > 10


def refused(x, hooks):
    if hooks:
        return "hooks"
    if x is None:
        return "none"
    return ""
"""

TESTS = """
from normswap.rules import refused, wide


def test_hooks():
    assert refused(1, True) == "hooks" and refused(1, False) == ""


def test_wide():
    assert wide(11) and not wide(9)


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
    code = "import mutate, pathlib, sys; mutate.LOADED = (); mutate.main(pathlib.Path(sys.argv.pop(1)))"
    command = [sys.executable, "-c", code, str(project), "rules.py", "--jobs", "2"]
    return subprocess.run(command, cwd=ROOT / "scripts", text=True, capture_output=True, check=False)


def test_a_condition_that_no_test_asks_for_survives(project: Path) -> None:
    done = mutated(project)
    assert done.returncode == 1, done.stderr
    assert "left out, failing without any mutation: tests/test_rules.py::test_of_this_place_only" in done.stderr
    *tried, greater, none, count = done.stdout.splitlines()
    assert greater == "survived  normswap/rules.py:3: x > 10  ->  (x >= 10)  (1 of 1 tests)"
    assert none == "survived  normswap/rules.py:9: x is None  ->  (False)  (1 of 1 tests)"
    assert count == "5 of 7 killed" and len(tried) == 7
    killed = next(line for line in tried if "-> (False)" in " ".join(line.split()) and "hooks" in line)
    assert killed.startswith("killed") and "FAILED tests/test_rules.py::test_hooks" in killed
    assert (project / "normswap/rules.py").read_text() == RULES
    again = mutated(project)
    assert sorted(again.stdout.splitlines()) == sorted(done.stdout.splitlines()) and again.stderr == ""


def test_a_run_that_does_not_end_is_ended(tmp_path: Path) -> None:
    assert mutate.forked(tmp_path, lambda: 3) == (3, "")
    assert mutate.forked(tmp_path, lambda: time.sleep(600) or 0, 0.2) == (None, "")  # type: ignore[func-returns-value]


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
