"""What scripts/mutate runs: conditions dropped or weakened one by one, and the tests that then still pass.

A condition is the test of an ``if``, a comprehension or a conditional expression, an operand of ``and`` and ``or``, a
``not``, a comparison or an ``all``/``any`` that is returned. First the tests run once under coverage, which tells which
test functions reach which line (kept in build/ until a file changes); a mutant is then tried on those that reach its
line, the quick ones first. Exit 1 if one survived.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import hashlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import coverage

ROOT = Path(__file__).resolve().parent.parent
WHERE = (
    "rules",
    "forwards",
    "regions",
    "kinds",
    "source.py",
    "apply.py",
    "validate.py",
    "compare.py",
    "criterion.py",
    "bounds.py",
)
"""The files of normswap/ whose conditions decide what is swapped and what is believed; those of them that are there."""
KEPT = ("normswap", "tests", "scripts", "csrc", "docs", "pyproject.toml", "README.md", "LICENSE")
"""What the tests need of the checkout."""
WEAKER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "compare.py",
        "not dims or size * sample <= SLICE_ELEMENTS",
        "(not dims)",
    ): "what fits is one piece, cut out whole",
    ("compare.py", "worst.problem", "(False)"): "the first problem stays: the rest is only compared for nothing",
    (
        "kinds/batch_norm.py",
        "site.running_mean is None and site.running_var is None",
        "(site.running_mean is None)",
    ): "in eval PyTorch raises for a BatchNorm that has one of them alone",
    (
        "regions/patterns.py",
        "isinstance(statement, ast.Assign) and statement.value is op.node",
        "(isinstance(statement, ast.Assign))",
    ): "used twice is only what has a name, and a flow gives one to what is assigned as it is",
    (
        "regions/spelling.py",
        '"norm" in name and "p" in bound and name != "normalize"',
        "('p' in bound and name != 'normalize')",
    ): "only norms have a p",
}
"""Mutations that change nothing that can be seen, and why: (file of normswap/, old, new). They are not tried."""
STUCK = 5.0
"""A mutant is given so many times what its tests took, and half a minute."""


@dataclass(frozen=True)
class Mutation:
    """``old``, at these offsets of the file's bytes, becomes ``new``."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        """The file's text with it. Raises ValueError if that is no longer what was read."""
        if source[self.start : self.end] != self.old.encode():
            raise ValueError(f"{self.path} has changed since its conditions were read; start again")
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


# --- what is mutated --------------------------------------------------------------------------------------------------


def mutations(path: str, source: str) -> list[Mutation]:
    """Every weaker or missing condition of a file, in its order, each once."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutation] = {}
    for node, new in _weakened(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = source.encode()[start:end].decode()
        if (path.removeprefix("normswap/"), " ".join(old.split()), new) not in EQUIVALENT:
            found.setdefault((start, end, new), Mutation(path, node.lineno, start, end, old, new))
    return [found[key] for key in sorted(found)]


def _weakened(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions, and what stands in the place of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "(False)"
            if not isinstance(node, ast.While):
                yield node.test, "(True)"
        elif isinstance(node, ast.comprehension):
            yield from ((condition, "(True)") for condition in node.ifs)
        elif isinstance(node, ast.BoolOp):
            for left_out in range(len(node.values)):
                rest = [value for index, value in enumerate(node.values) if index != left_out]
                kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield node, f"({ast.unparse(kept)})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in WEAKER:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield node, f"({left} {WEAKER[type(node.ops[0])]} {right})"
        elif isinstance(node, ast.Return) and node.value is not None and _is_truth(node.value):
            yield node.value, "(True)"
            yield node.value, "(False)"


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("all", "any", "bool", "isinstance")
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def files(names: Sequence[str], root: Path = ROOT) -> list[str]:
    """The files of normswap/ that are meant, as paths from the root."""
    chosen: list[Path] = []
    for name in names or [name for name in WHERE if (root / "normswap" / name).exists()]:
        path = root / "normswap" / name.removeprefix("normswap/")
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise SystemExit(f"no such file in normswap/: {name}")
        chosen += found
    return [path.relative_to(root).as_posix() for path in chosen]


# --- which tests reach which line -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """``lines``: by file and line the test functions that run it; ``seconds``: of each test function."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def by(self, mutation: Mutation) -> list[str]:
        """The test functions that reach a mutation, quick ones first; of what runs at import, all of the file's."""
        lines = self.lines.get(mutation.path, {})
        tests = lines.get(str(mutation.line)) or {test for found in lines.values() for test in found}
        return sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test))


def reached(tests: Sequence[str], kept_in: Path, root: Path = ROOT) -> Reached:
    """What a run of ``tests`` under coverage reaches, or what one of the same files did before."""
    paths = sorted(path for top in ("normswap", "tests") for path in (root / top).rglob("*.py"))
    known = hashlib.sha256(b"\0".join([*(str(test).encode() for test in tests), *(p.read_bytes() for p in paths)]))
    file = kept_in / f"reached-{known.hexdigest()[:16]}.json"
    if not file.is_file():
        print("mutate: running the tests once under coverage ...", file=sys.stderr, flush=True)
        with copied(root) as tree:
            found = _covered(tests, tree)
        kept_in.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"lines": found.lines, "seconds": found.seconds}))
    return Reached(**json.loads(file.read_text()))


def _covered(tests: Sequence[str], tree: Path) -> Reached:
    settings, data, results = tree / ".coveragerc", tree / ".coverage", tree / "results.xml"
    settings.write_text(f"[run]\nsource = normswap\ndynamic_context = test_function\ndata_file = {data}\n")
    command = ["-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", f"--junitxml={results}"]
    done = _python(tree, *command, "-p", "no:cacheprovider", *tests)
    if not results.is_file():
        raise SystemExit(f"the tests do not run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    seconds, failing = _outcomes(results.read_text())
    if failing:  # such as those that ask git, which a copy has none of
        print(f"mutate: left out, failing without any mutation: {', '.join(sorted(failing))}", file=sys.stderr)
    covered = coverage.CoverageData(str(data))
    covered.read()
    lines = {}
    for name in covered.measured_files():
        by_line = covered.contexts_by_lineno(name).items()
        here = {str(line): sorted({_node(c) for c in contexts if c} - failing) for line, contexts in by_line}
        lines[Path(name).relative_to(tree.resolve()).as_posix()] = {
            line: found for line, found in here.items() if found
        }
    return Reached(lines, seconds)


def _node(context: str) -> str:
    """pytest's name of a test function that coverage calls module.function."""
    module, _, function = context.rpartition(".")
    return f"tests/{module.rpartition('.')[2]}.py::{function}"


def _outcomes(text: str) -> tuple[dict[str, float], set[str]]:
    """The seconds of each test function in what pytest --junitxml wrote, and those of which something failed."""
    seconds: dict[str, float] = {}
    failing = set()
    for case in ElementTree.fromstring(text).iter("testcase"):
        node = _node(f"{case.attrib['classname']}.{case.attrib['name'].partition('[')[0]}")
        seconds[node] = seconds.get(node, 0.0) + float(case.attrib["time"])
        if case.find("failure") is not None or case.find("error") is not None:
            failing.add(node)
    return seconds, failing


# --- what becomes of a mutant -----------------------------------------------------------------------------------------


class copied:
    """A copy of the checkout in a temporary folder, for a ``with`` block."""

    def __init__(self, root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutate-")
        self._root = root

    def __enter__(self) -> Path:
        tree = Path(self._folder.name)
        for name in KEPT:
            source = self._root / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source.is_file():
                shutil.copy(source, tree / name)
        return tree

    def __exit__(self, *raised: object) -> None:
        self._folder.cleanup()


def _python(tree: Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=env, text=True, capture_output=True, timeout=timeout, check=False)


def fate(mutation: Mutation, found: Reached, budget: float, tree: Path) -> dict[str, Any]:
    """What the tests say of a mutant: "killed" by which, "survived" of how many, or "unreached"."""
    reaching = found.by(mutation)
    chosen, spent = [], 0.0
    for test in reaching:
        spent += found.seconds.get(test, 0.0)
        if chosen and spent > budget:
            break
        chosen.append(test)
    told = {"mutation": str(mutation), "of": len(reaching), "tests": len(chosen)}
    if not chosen:
        return {**told, "fate": "unreached", "by": ""}
    path = tree / mutation.path
    source = path.read_bytes()
    path.write_bytes(mutation.applied(source))
    try:
        pytest = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *chosen]
        done = _python(tree, *pytest, timeout=30 + STUCK * budget)
    except subprocess.TimeoutExpired:
        return {**told, "fate": "killed", "by": "took too long"}
    finally:
        path.write_bytes(source)
    if done.returncode == 0:
        return {**told, "fate": "survived", "by": ""}
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {**told, "fate": "killed", "by": failed[0] if failed else f"exit {done.returncode}"}


def try_all(
    chosen: Iterable[Mutation], found: Reached, budget: float, jobs: int, root: Path = ROOT
) -> Iterator[dict[str, Any]]:
    """The fate of each mutation, as they end; ``jobs`` at a time, each in a copy of its own."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutation: Mutation) -> dict[str, Any]:
        tree = trees.get()
        try:
            return fate(mutation, found, budget, tree)
        finally:
            trees.put(tree)

    holders = [copied(root) for _ in range(jobs)]
    try:
        for holder in holders:
            trees.put(holder.__enter__())
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for done in concurrent.futures.as_completed([pool.submit(one, mutation) for mutation in chosen]):
                yield done.result()
    finally:
        for holder in holders:
            holder.__exit__()


def summary(fates: Sequence[dict[str, Any]]) -> str:
    """How many were killed, and each that was not."""
    alive = sorted((one for one in fates if one["fate"] != "killed"), key=lambda one: one["mutation"])
    lines = [f"{one['fate']:9} {one['mutation']}  ({one['tests']} of {one['of']} tests)" for one in alive]
    return "\n".join([*lines, f"{len(fates) - len(alive)} of {len(fates)} killed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help=f"files or folders of normswap/ (default: {' '.join(WHERE)})")
    parser.add_argument("--sample", type=int, help="so many mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests that a mutant is tried on")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="the test files that are run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    arguments = parser.parse_args()
    found = [one for path in files(arguments.files) for one in mutations(path, (ROOT / path).read_text())]
    if arguments.sample is not None and arguments.sample < len(found):
        found = random.Random(arguments.seed).sample(found, arguments.sample)
    if arguments.list:
        print(*found, f"{len(found)} mutations", sep="\n")
        return
    fates = []
    for one in try_all(found, reached(arguments.tests, ROOT / "build"), arguments.budget, arguments.jobs):
        fates.append(one)
        print(f"{one['fate']:9} {one['mutation']}  {one['by']}", flush=True)
    print(summary(fates))
    sys.exit(any(one["fate"] != "killed" for one in fates))


if __name__ == "__main__":
    main()
