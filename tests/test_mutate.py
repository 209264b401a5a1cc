"""Mutations of conditions: what is made of a source, and which tests notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mutate
import pytest

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
    for one in mutate.mutations("small.py", SOURCE):
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
    for one in mutate.mutations("small.py", SOURCE):
        text = one.applied(SOURCE.encode()).decode()
        assert any(text == SOURCE[:at] + one.new + SOURCE[at + len(one.old) :] for at in range(len(SOURCE))), one
        compile(text, "small.py", "exec")
        assert text.splitlines()[one.line - 1] != SOURCE.splitlines()[one.line - 1]
    with pytest.raises(ValueError, match="has changed"):
        mutate.mutations("small.py", SOURCE)[0].applied(b"another text that is long enough " * 9)


def test_what_changes_nothing_is_there_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(mutate.EQUIVALENT)
    monkeypatch.setattr(mutate, "EQUIVALENT", {})
    for path, old, new in known:
        source = (mutate.ROOT / "normswap" / path).read_text()
        made = [(" ".join(one.old.split()), one.new) for one in mutate.mutations(f"normswap/{path}", source)]
        assert (old, new) in made, (path, old)
    monkeypatch.setattr(mutate, "EQUIVALENT", {("small.py", "x", "(True)"): "why"})
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


def test_a_condition_that_no_test_asks_for_survives(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mutations = [one for one in mutate.mutations("normswap/rules.py", RULES) if one.new != "(True)"]
    reached = mutate.reached(["tests"], project / "build", project)
    assert "left out, failing without any mutation: tests/test_rules.py::test_of_this_place_only" in (
        capsys.readouterr().err
    )
    assert set(reached.seconds) == {
        f"tests/test_rules.py::test_{name}" for name in ("hooks", "wide", "of_this_place_only")
    }
    fates = {one["mutation"]: one for one in mutate.try_all(mutations, reached, 60.0, 2, project)}
    assert {name.partition(": ")[2]: one["fate"] for name, one in fates.items()} == {
        "x > 10  ->  (False)": "killed",
        "x > 10  ->  (x >= 10)": "survived",
        "hooks  ->  (False)": "killed",
        "x is None  ->  (False)": "survived",
    }
    assert (project / "normswap/rules.py").read_text() == RULES
    told = mutate.summary(list(fates.values()))
    assert told.endswith("2 of 4 killed") and "survived  normswap/rules.py:9: x is None  ->  (False)" in told
    killed = next(one for one in fates.values() if one["fate"] == "killed")
    assert "test_rules.py::test_" in killed["by"] and killed["tests"] == killed["of"] == 1


def test_the_real_files_are_all_mutated() -> None:
    listed = subprocess.run(
        [sys.executable, "scripts/mutate.py", "--list", "--sample", "30", "--seed", "1"],
        cwd=mutate.ROOT,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.splitlines()
    assert (
        len(listed) == 31 and listed[-1] == "30 mutations" and all(line.startswith("normswap/") for line in listed[:-1])
    )
    for path in mutate.files([]):
        assert path.startswith("normswap/") and (mutate.ROOT / path).is_file()
    with pytest.raises(SystemExit, match="no such file in normswap/: nothing.py"):
        mutate.files(["nothing.py"])
