"""What scripts/mutate runs: conditions dropped or weakened one by one, and the tests that then still pass.

A condition is the test of an ``if``, a comprehension or a conditional expression, an operand of ``and`` and ``or``, a
``not``, a comparison or an ``all``/``any`` that is returned. First the test files run once under coverage, which tells
which test reaches which function (kept in build/mutate until the test file changes, or
normswap has other functions); a mutant is then tried on those
that reach its function: quick ones that reach little else first. Each run is a fork of this process, which has loaded
torch, in a copy of the checkout. Exit 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import coverage
import pytest
from mutations import WHERE, Mutation, files, functions, mutations

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("normswap", "tests", "scripts", "csrc", "docs", "pyproject.toml", "README.md", "LICENSE")
"""What the tests need of the checkout."""
LOADED = ("torch", "torch._dynamo", "torch.testing", "hypothesis", "numpy", "safetensors.torch")
"""What every test file imports is loaded once."""
FIRST = 5.0
"""Seconds of tests that are tried before the others: most mutants end there."""
STUCK = 5.0
"""A mutant is given so many times what its tests took, and half a minute."""


# --- a run of pytest in a fork ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of the checkout in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder).resolve()
        for name in KEPT:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source.is_file():
                shutil.copy2(source, tree / name)
        yield tree


def forked(tree: Path, work: Callable[[], int], seconds: float | None = None) -> tuple[int | None, str]:
    """What ``work`` returns in a fork of this process in ``tree``, None if it takes longer; and what it prints."""

    def child() -> None:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        ours = [str(tree / name) for name in ("", "scripts", "tests")]
        sys.path[:0] = ours
        os.environ["PYTHONPATH"] = os.pathsep.join(ours)
        code = work()
        sys.stdout.flush()
        os._exit(code)

    output = tree / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return (None if process.exitcode == -signal.SIGKILL else process.exitcode), output.read_text(errors="replace")


def tested(tree: Path, *arguments: str) -> Callable[[], int]:
    """A run of pytest, for ``forked``."""
    return lambda: int(pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "--rootdir", str(tree), *arguments]))


# --- which tests reach which function ---------------------------------------------------------------------------------


class Reached:
    """``tests``: by file and function the tests that run it; ``seconds``, ``reach``: of a test, how many it runs."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.reach: dict[str, int] = {}

    def add(self, seconds: dict[str, float], functions: dict[str, list[str]]) -> None:
        """What a test file reaches."""
        self.seconds |= seconds
        for name, tests in functions.items():
            for test in tests:
                self.tests.setdefault(name, set()).add(test)
                self.reach[test] = self.reach.get(test, 0) + 1

    def by(self, mutation: Mutation, source: str) -> list[str]:
        """The tests that reach a mutation, likely ones first; of what runs at import, all of the file."""
        name = functions(source).get(mutation.line)
        prefix = f"{mutation.path}::"
        tests = self.tests.get(f"{prefix}{name}", set())
        tests = tests or {test for key, found in self.tests.items() if key.startswith(prefix) for test in found}
        return sorted(tests, key=lambda test: ((0.1 + self.seconds.get(test, 0.0)) * self.reach[test], test))


def reached(tests: Sequence[str], jobs: int, root: Path) -> Reached:
    """What the test files reach, from a run under coverage or what one of the same file did before."""
    found, kept_in = Reached(), root / "build/mutate"
    kept_in.mkdir(parents=True, exist_ok=True)
    sources = sorted((root / "normswap").rglob("*.py"))
    known = json.dumps([[path.name, *dict.fromkeys(functions(path.read_text()).values())] for path in sources]).encode()
    paths = sorted(
        path for name in tests for path in ([root / name] if name[-3:] == ".py" else (root / name).glob("test_*"))
    )

    def one(tree: Path, path: Path) -> Any:
        file = kept_in / f"{path.stem}-{hashlib.sha256(path.read_bytes() + known).hexdigest()[:16]}.json"
        if file.is_file():
            return json.loads(file.read_text())
        reached = _covered(path.relative_to(root).as_posix(), tree)
        print(f"mutate: {path.name} was run under coverage", file=sys.stderr, flush=True)
        if reached[0]:
            file.write_text(json.dumps(reached))
        return reached

    for reached in _side_by_side(one, paths, jobs, root):
        found.add(*reached)
    return found


def _covered(test_file: str, tree: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """The seconds of the tests of a file that pass; by file and function, which of them run it."""
    data, results = tree / ".coverage", tree / "results.xml"
    data.unlink(missing_ok=True)
    results.unlink(missing_ok=True)

    def work() -> int:
        watch = coverage.Coverage(data_file=str(data), source=[str(tree / "normswap")], config_file=False)
        watch.set_option("run:dynamic_context", "test_function")
        with watch.collect():
            code = tested(tree, f"--junitxml={results}", test_file)()
        watch.save()
        return code

    _, told = forked(tree, work, 900)
    if not results.is_file():
        print(f"mutate: {test_file} does not run:\n{told[-1000:]}", file=sys.stderr)
        return {}, {}
    seconds, failing = _outcomes(results.read_text())
    if failing:  # such as those that ask git, which a copy has none of
        print(f"mutate: left out, failing without any mutation: {', '.join(sorted(failing))}", file=sys.stderr)
    covered = coverage.CoverageData(str(data))
    covered.read()
    found: dict[str, set[str]] = {}
    for name in covered.measured_files():
        path, of_line = Path(name).relative_to(tree).as_posix(), functions(Path(name).read_text())
        for line, contexts in covered.contexts_by_lineno(name).items():
            tests = {_node(context) for context in contexts if context} - failing
            found.setdefault(f"{path}::{of_line.get(line, '')}", set()).update(tests)
    return seconds, {name: sorted(tests) for name, tests in found.items() if tests}


def _node(context: str) -> str:
    """pytest's name of a test function that coverage calls module.function."""
    module, _, name = context.rpartition(".")
    return f"tests/{module.rpartition('.')[2]}.py::{name}"


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


def fate(mutation: Mutation, found: Reached, budget: float, tree: Path) -> dict[str, Any]:
    """What the tests say of a mutant: "killed" by which, "survived" of how many, or "unreached"."""
    path = tree / mutation.path
    source = path.read_bytes()
    reaching = found.by(mutation, source.decode())
    chosen = _within(reaching, found.seconds, budget)
    told = {"mutation": str(mutation), "of": len(reaching), "tests": len(chosen), "by": ""}
    first = _within(chosen, found.seconds, FIRST)
    for part in (first, chosen[len(first) :]):
        tests = [*part]
        while tests:
            path.write_bytes(mutation.applied(source))
            try:
                code, said = forked(tree, tested(tree, "-x", *tests), 30 + STUCK * budget)
            finally:
                path.write_bytes(source)
            if code == 0:
                break
            failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if not failed or _passes(failed[0], tree):
                return {**told, "fate": "killed", "by": failed[0] if failed else f"exit {code} {said[-200:]}"}
            tests = [test for test in tests if not test.startswith(_failing(failed[0]))]
    return {**told, "fate": "survived" if chosen else "unreached"}


def _failing(line: str) -> str:
    return line.split()[1].partition("[")[0]


def _passes(line: str, tree: Path) -> bool:
    """Whether the test that pytest says fails does not without the mutation: it is no other fault, nor chance."""
    name = _failing(line)
    return forked(tree, tested(tree, *(() if "::" in name else ("--collect-only",)), name), 900)[0] == 0


def _within(tests: Sequence[str], seconds: dict[str, float], budget: float) -> Sequence[str]:
    """The first of ``tests`` that take so many seconds together, one at least."""
    spent = list(itertools.accumulate(seconds.get(test, 0.0) for test in tests))
    return tests[: max(1, sum(until <= budget for until in spent))]


def _side_by_side(work: Callable[[Path, Any], Any], items: Iterable[Any], jobs: int, root: Path) -> Iterator[Any]:
    """What ``work`` makes of each item in a copy of the checkout, as they end; ``jobs`` at a time."""
    with contextlib.ExitStack() as stack:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(jobs):
            trees.put(stack.enter_context(copied(root)))

        def one(item: Any) -> Any:
            tree = trees.get()
            try:
                return work(tree, item)
            finally:
                trees.put(tree)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        yield from (done.result() for done in as_completed([pool.submit(one, item) for item in items]))


def try_all(
    chosen: Iterable[Mutation], found: Reached, budget: float, jobs: int, root: Path
) -> Iterator[dict[str, Any]]:
    """The fate of each mutation, as they end."""
    return _side_by_side(lambda tree, mutation: fate(mutation, found, budget, tree), chosen, jobs, root)


def summary(fates: Sequence[dict[str, Any]]) -> str:
    """How many were killed, and each that was not."""
    alive = sorted((one for one in fates if one["fate"] != "killed"), key=lambda one: one["mutation"])
    lines = [f"{one['fate']:9} {one['mutation']}  ({one['tests']} of {one['of']} tests)" for one in alive]
    return "\n".join([*lines, f"{len(fates) - len(alive)} of {len(fates)} killed"])


def main(root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help=f"files or folders of normswap/ (default: {' '.join(WHERE)})")
    parser.add_argument("--sample", type=int, help="so many mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of tests that a mutant is tried on")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="the test files that are run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    arguments = parser.parse_args()
    found = [one for path in files(arguments.files, root) for one in mutations(path, (root / path).read_text())]
    if arguments.sample is not None and arguments.sample < len(found):
        found = random.Random(arguments.seed).sample(found, arguments.sample)
    if arguments.list:
        print(*found, f"{len(found)} mutations", sep="\n")
        return
    fates = []
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has none of its parent's threads
    for name in LOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    tests = reached(arguments.tests, arguments.jobs, root)
    for one in try_all(found, tests, arguments.budget, arguments.jobs, root):
        fates.append(one)
        print(f"{one['fate']:9} {one['mutation']}  {one['by']}", flush=True)
    print(summary(fates))
    sys.exit(any(one["fate"] != "killed" for one in fates))


if __name__ == "__main__":
    main()
