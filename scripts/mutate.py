"""What scripts/mutate runs: conditions dropped or weakened one by one, and the tests that then still pass.

A condition is the test of an ``if``, a comprehension or a conditional expression, an operand of ``and`` and ``or``, a
``not``, a comparison or an ``all``/``any`` that is returned. One process collects the tests and forks. Each test file
runs once in a fork under coverage, which tells which test reaches which line (kept in build/mutate until the file
changes). A mutant is a fork in which the functions of its file have the code of the changed source (what runs at import
is run again); it is tried on the tests that reach its line, quick ones first and those that run lines beside it
which few run, and is killed where they fail, or take several times as long, and pass in a fork without it. Processes
that a test starts and what ran at import do not see it. Exit 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import linecache
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from mutations import WHERE, Mutation, files, functions, mutations

ROOT = Path(__file__).resolve().parent.parent
FIRST = 5.0
"""Seconds of tests that are tried before the others: most mutants end there."""
STUCK, GRACE = 5.0, 30.0
"""A mutant is given so many times what its tests took, and so many seconds."""
FORK = multiprocessing.get_context("fork")


def forked(work: Callable[[], Any], seconds: float | None = None) -> Any:
    """What ``work`` returns in a fork of this process; None if it takes longer, or the fork dies."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        os.setsid()
        sender.send(work())
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else None
    except EOFError:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def side_by_side(work: Callable[[Any], Any], items: Iterable[Any], jobs: int) -> Iterator[Any]:
    """What ``work`` makes of each item, as they end; ``jobs`` at a time, each in a fork."""
    with ProcessPoolExecutor(jobs, FORK, initializer=_WORK.append, initargs=(work,)) as pool:
        yield from (done.result() for done in as_completed([pool.submit(_work, item) for item in items]))


_WORK: list[Callable[[Any], Any]] = []


def _work(item: Any) -> Any:
    return _WORK[-1](item)


def weaken(mutation: Mutation, text: str, root: Path, loaded: Iterable[FunctionType]) -> None:
    """Give those functions that are of the mutation's file the code that ``text`` has for them."""
    module = compile(text, str(root / mutation.path), "exec", dont_inherit=True)
    linecache.cache[module.co_filename] = len(text), None, text.splitlines(keepends=True), module.co_filename
    if functions(text).get(mutation.line):
        code = {_place(one): one for one in _codes(module)}
        for function in loaded:
            if function.__code__.co_filename == module.co_filename:
                new = code.get(_place(function.__code__), function.__code__)
                if new != function.__code__:
                    function.__code__ = new
        return
    ours = vars(sys.modules[mutation.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")])
    before = dict(ours)
    exec(module, ours)
    for other in [*sys.modules.values()]:
        for key in before.keys() & vars(other).keys():
            if vars(other)[key] is before[key]:
                vars(other)[key] = ours[key]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _place(code: CodeType) -> tuple[Any, ...]:
    return code.co_name, code.co_firstlineno, code.co_varnames[: code.co_argcount], code.co_freevars


class Tests:
    """A plugin of pytest that calls ``work`` with what was collected instead of running it.

    ``items``: by test function its cases; of those that ``note`` ran: ``reaching``, by line and function the tests that
    run it; ``seconds`` of a test.
    """

    def __init__(self, root: Path, budget: float, say: Callable[[str], Any], work: Callable[[Tests], None]) -> None:
        self.root, self.budget, self.say, self.work = root, budget, say, work
        self.items: dict[str, list[pytest.Item]] = {}
        self.reaching: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failing: set[str] = set()
        self.pass_without: set[tuple[str | None, ...]] = set()
        self.sources = {path: (root / path).read_text() for path in files(["."], root)}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(f"mutate: {report.nodeid} does not run:\n{report.longreprtext[-1000:]}")

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.say(str(excrepr))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self.items.setdefault(item.nodeid.partition("[")[0], []).append(item)
        self.loaded = [one for one in gc.get_objects() if type(one) is FunctionType]
        gc.freeze()  # or a fork copies all of it to count it
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed:
            self.failing.add(name)

    def run(self, names: Sequence[str], before: Callable[[str], Any] | None = None) -> str:
        """Run these tests, to the first that fails unless something is called before each: its name."""
        self.failing.clear()
        items = [(name, item) for name in names for item in self.items[name]]
        for (name, item), (_, following) in itertools.pairwise([*items, ("", None)]):
            if before:
                before(name)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failing and not before:
                break
        return next(iter(self.failing), "")

    def note(self, path: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
        """What the tests of a file reach, from a run under coverage or what one of the same file did before."""
        kept = self.root / f"build/mutate/{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.json"
        if kept.is_file():
            return json.loads(kept.read_text())
        names = [name for name in self.items if name.startswith(f"{path.relative_to(self.root).as_posix()}::")]
        seconds, reaching, failing = forked(lambda: self._covered(names), 1800) or ({}, {}, names)
        self.say(f"mutate: {path.name} was run under coverage")
        if failing:
            self.say(f"mutate: left out, failing without any mutation: {', '.join(sorted(failing))}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([seconds, reaching]))
        return seconds, reaching

    def _covered(self, names: Sequence[str]) -> tuple[dict[str, float], dict[str, list[str]], set[str]]:
        """The seconds of these tests; by line and function, those that run it and pass; those that do not pass."""
        watch = coverage.Coverage(data_file=None, source=[str(self.root / "normswap")], config_file=False)
        with watch.collect():
            self.run(names, watch.switch_context)
        found: dict[str, set[str]] = {}
        covered = watch.get_data()
        for file in covered.measured_files():
            path = Path(file).relative_to(self.root).as_posix()
            lines, of_line = self.sources[path].splitlines(), functions(self.sources[path])
            for line, contexts in covered.contexts_by_lineno(file).items():
                for key in (lines[line - 1].strip(), of_line.get(line, "")):
                    found.setdefault(f"{path}::{key}", set()).update({*contexts} - {""} - self.failing)
        return self.seconds, {key: sorted(tests) for key, tests in found.items() if tests}, self.failing

    def learn(self, seconds: dict[str, float], reaching: dict[str, list[str]]) -> None:
        """What a test file reaches."""
        self.seconds |= seconds
        for key, tests in reaching.items():
            self.reaching.setdefault(key, set()).update(tests)

    def by(self, mutation: Mutation) -> list[str]:
        """The tests that reach a mutation, likely ones first; of what runs at import, all of the file."""
        text, prefix = self.sources[mutation.path], f"{mutation.path}::"
        names, lines = functions(text), text.splitlines()
        name = names.get(mutation.line)
        near = {line.strip() for number, line in enumerate(lines, 1) if name in (None, names.get(number))} - {""}
        rare: Counter[str] = Counter()
        for tests in (self.reaching.get(prefix + line, ()) for line in near):
            rare.update({test: 1 / len(tests) for test in tests})
        known = (self.reaching.get(f"{prefix}{key}") for key in (lines[mutation.line - 1].strip(), name) if key)
        found = next(filter(None, known), {*rare})
        cost = {test: (0.1 + self.seconds[test]) / (0.01 + rare[test]) for test in found & self.items.keys()}
        return sorted(cost, key=lambda test: (cost[test], test))

    def fate(self, mutation: Mutation) -> dict[str, Any]:
        """What the tests say of a mutant: "killed" by which, "survived" of how many, or "unreached"."""
        text, reaching = self.sources[mutation.path], self.by(mutation)
        chosen = self._within(reaching, self.budget)
        told = {"mutation": str(mutation), "of": len(reaching), "tests": len(chosen), "by": ""}
        first = self._within(chosen, FIRST)
        for part in (first, chosen[len(first) :]):
            tests = [*part]
            while tests:
                seconds = GRACE + STUCK * sum(self.seconds[test] for test in tests)
                failed = self._tried(mutation, mutation.applied(text), tests, seconds)
                if failed == "":
                    break
                until = tests[: tests.index(failed) + 1] if failed else tests
                key = mutation.path, functions(text).get(mutation.line), *until
                if key in self.pass_without or self._tried(mutation, text, until, seconds / 2) == "":
                    self.pass_without.add(key)
                    return {**told, "fate": "killed", "by": failed or "that they did not end"}
                tests = [test for test in tests if failed and test != failed]  # no other fault, nor chance, is a kill
        return {**told, "fate": "survived" if chosen else "unreached"}

    def _tried(self, mutation: Mutation, text: str, tests: Sequence[str], seconds: float) -> str | None:
        """Which of the tests fails first with this text of the file, or none; None if they do not end in time."""

        def work() -> str:
            weaken(mutation, text, self.root, self.loaded)
            return self.run(tests)

        return forked(work, seconds)

    def _within(self, tests: Sequence[str], budget: float) -> Sequence[str]:
        """The first of ``tests`` that take so many seconds together, one at least."""
        spent = itertools.accumulate(self.seconds[test] for test in tests)
        return tests[: max(1, sum(until <= budget for until in spent))]


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
    chosen = [one for path in files(arguments.files, root) for one in mutations(path, (root / path).read_text())]
    if arguments.sample is not None and arguments.sample < len(chosen):
        chosen = random.Random(arguments.seed).sample(chosen, arguments.sample)
    if arguments.list:
        print(*chosen, f"{len(chosen)} mutations", sep="\n")
        return
    given = (root / name for name in arguments.tests)
    paths = sorted(path for one in given for path in ([one] if one.is_file() else one.glob("test_*.py")))
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has none of its parent's threads
    sys.path.insert(0, str(root))
    os.chdir(root)
    out, errors = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
    for fd in (1, 2):  # what pytest and the tests say
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    fates = []

    def work(tests: Tests) -> None:
        for kept in side_by_side(tests.note, paths, arguments.jobs):
            tests.learn(*kept)
        for one in side_by_side(tests.fate, chosen, arguments.jobs):
            fates.append(one)
            print(f"{one['fate']:9} {one['mutation']}  {one['by']}", file=out)

    tests = Tests(root, arguments.budget, lambda text: print(text, file=errors), work)
    pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(root), *map(str, paths)], plugins=[tests])
    print(summary(fates), file=out)
    sys.exit(any(one["fate"] != "killed" for one in fates))


if __name__ == "__main__":
    main()
