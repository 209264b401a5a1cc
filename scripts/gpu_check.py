"""What scripts/gpu_check runs; see there."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import children
import engines
import record as records
import torch
from record import Record, Row

from normswap import native, nodes

ROOT = Path(__file__).resolve().parent.parent
SANITIZED = "tests/gpu/test_sanitized_sweep.py"
TOOLS = ("memcheck", "racecheck")
SEEN = {"racecheck": "not test_convolution or depthwise"}
"""What a tool runs of it where not all: kernels that multiply by warpgroups end racecheck, by an exception in it."""
ALONE = ("test_workloads.py", "test_cost.py", "test_choice.py")
"""Test files that time, or need most of the GPU's memory."""
AT_ONCE, THREADS = 12, 2
"""How many files of tests, and threads of each on the CPU."""

Told = dict[str, dict[str, float]]
"""Figures by test and name."""


def test_files(only: Sequence[str]) -> list[Path]:
    """The files of tests/gpu, or those of these names. Raises SystemExit for a name that is none."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    if unknown := set(only) - {file.name for file in files}:
        raise SystemExit(f"no such file in tests/gpu: {', '.join(sorted(unknown))}")
    return [file for file in files if not only or file.name in only]


def run_tests(
    files: Sequence[Path],
    took: dict[str, float],
    beside: Callable[[], None],
    keep: Callable[[str, dict[str, Any], Told], None],
) -> None:
    """Hand to ``keep``, whenever a file has ended, its name, how many of its tests passed, failed and were skipped, and
    what they told by record_property. A process a file, several at once and ``beside`` with them, but none beside those
    that time; those that took longest before start first. Prints what fails; in the end raises what ``beside`` did."""
    files = sorted(files, key=lambda file: -took.get(file.name, 1e9))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool, concurrent.futures.ThreadPoolExecutor(1) as aside:
        running = {pool.submit(_run_file, file): file for file in files if file.name not in ALONE}
        also = aside.submit(beside)
        for done in concurrent.futures.as_completed(running):
            keep(running[done].name, *done.result())
    for file in files:
        if file.name in ALONE:
            keep(file.name, *_run_file(file))
    also.result()


def _run_file(file: Path) -> tuple[dict[str, Any], Told]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        told = ["-o", "junit_family=xunit1", f"--junitxml={results}"]  # xunit2 has no properties
        tests = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", *told]
        done = children.run(tests, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(THREADS)})
        if done.returncode != 0:
            print(f"== {file.name}: exit {done.returncode}\n{done.stdout[-5000:]}{done.stderr[-1000:]}", flush=True)
        if not results.is_file():
            raise SystemExit(f"{file.name}: pytest ended with {done.returncode} and no results")
        return read_results(results.read_text())


def read_results(text: str) -> tuple[dict[str, Any], Told]:
    """The counts and seconds in what pytest --junitxml wrote, and the figures its tests told."""
    suite = ElementTree.fromstring(text).find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    told = {
        case.attrib["name"]: {one.attrib["name"]: float(one.attrib["value"]) for one in case.iter("property")}
        for case in suite.iter("testcase")
        if case.find("properties") is not None
    }
    seconds = round(float(suite.attrib["time"]), 1)
    return {"passed": total - skipped - failed, "failed": failed, "skipped": skipped, "seconds": seconds}, told


def run_sanitizer(tool: str) -> dict[str, Any]:
    """compute-sanitizer over a reduced sweep of every regime and path, forward and backward."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return {"tool": tool, "result": "compute-sanitizer not found"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SANITIZED, "-k", SEEN.get(tool, "")]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", tool, "--error-exitcode", "99", "--kernel-name", "kns=normswap", *tests]
    started = time.monotonic()
    done = children.run(command, cwd=ROOT, env=env)
    told = ("SUMMARY", "passed", "failed")
    summary = [line.strip("= ") for line in done.stdout.splitlines() if any(word in line for word in told)]
    result = "; ".join(summary) if done.returncode == 0 else f"{done.stdout[:3000]} [...] {done.stdout[-500:]}"
    return {"tool": tool, "exit": done.returncode, "seconds": round(time.monotonic() - started), "result": result}


class Checking:
    """What is recorded while parts run: each is merged into the record as it ends, with one stamp."""

    def __init__(self, record: Record, path: Path, made: dict[str, Any]) -> None:
        self.record, self.path, self.failed = record, path, False
        self._made = made
        self._alone = threading.RLock()

    def add(
        self, part: str, rows: Sequence[Row], key: Callable[[Row], object], order: Sequence[object] | None = None
    ) -> None:
        """Put ``rows`` in the place of those of the same key; see records.merged."""
        with self._alone:
            name = records.stamp(self.record, self._made)
            new = [{**row, "stamp": name} for row in rows]
            self.record[part] = records.merged(self.record[part], new, key, order)
            records.save(self.record, self.path)

    def add_tests(self, file: str, counts: dict[str, Any], told: Told) -> None:
        """Put them in the place of the file's earlier ones; where a machine skips a whole file, as with one GPU those
        for two, those stay, and are stale in time."""
        if not counts["passed"] + counts["failed"] and file in self.record["tests"]:
            return
        with self._alone:
            self.failed |= bool(counts["failed"])
            tests = self.record["tests"] | {
                file: {**counts, "told": told, "stamp": records.stamp(self.record, self._made)}
            }
            there = {one.name for one in test_files(())}
            self.record["tests"] = {name: tests[name] for name in sorted(tests) if name in there}
            records.save(self.record, self.path)

    # --- the parts ---

    def benchmark(self, patterns: Sequence[str], compiling: bool) -> None:
        import benchmark
        import host_cost
        from device_time import copy_rate

        these, rate = benchmark.chosen([one for one in patterns if one != "host"]), copy_rate()
        self._made |= {"peers": benchmark.versions(), "copy_GB_per_s": rate / 1e6}
        order = [(w.name, w.shape, w.what, w.mode) for w in benchmark.all_workloads()]
        rows = []
        for row in benchmark.measured([] if patterns == ["host"] else these, rate, compiling, ahead=True):
            rows.append(row)
            self.add("benchmark", [row], records.key_of_row, order)
            print(*benchmark.cells(row, benchmark.columns([row])), sep="  ", flush=True)
        host = host_cost.on_the_gpu() if not patterns or "host" in patterns else []
        self.add("host", host, lambda row: (row["module"], row["gradients"]))
        print(benchmark.table(rows, host), flush=True)
        self.failed |= bool(benchmark.summary(rows)["not_proved"])

    def models(self, names: Sequence[str], compiling: bool, ahead: bool = True) -> None:
        import check_models

        order = [row.name for row in check_models.EVERY]
        for row in check_models.check_all(names, compiling, ahead):
            self.add("models", [row], lambda row: row["model"], order)
            print(check_models.table([row]), flush=True)
            self.failed |= bool(row["problems"])

    def accuracy(self, kinds: Sequence[str]) -> None:
        import accuracy

        if unknown := set(kinds) - set(accuracy.KINDS):
            raise SystemExit(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(accuracy.KINDS)}")
        errors = accuracy.measure_all(kinds or accuracy.KINDS)
        measured = {row["kind"] for row in errors}
        self.record["errors"] = [row for row in self.record["errors"] if row["kind"] not in measured]
        self.add("errors", errors, records.key_of_error)
        print(accuracy.table(errors), flush=True)
        self.failed |= bool(accuracy.beyond(errors))

    def sanitizer(self, tools: Sequence[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(TOOLS)) as pool:
            for run in pool.map(run_sanitizer, tools or TOOLS):
                self.add("sanitizer", [run], lambda row: row["tool"])
                print(run, flush=True)
                self.failed |= run.get("exit") != 0

    def tests(self, only: Sequence[str], beside: Callable[[], None]) -> None:
        took = {name: found["seconds"] for name, found in self.record["tests"].items()}
        run_tests(test_files(only), took, beside, self.add_tests)


def made_here() -> dict[str, Any]:
    """What a stamp says of figures made now, here."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": native.driver_cuda(),
        "date": datetime.date.today().isoformat(),
        "sources": engines.digests(),
    }


def asked(arguments: Sequence[str] | None = None) -> tuple[dict[str, list[str] | None], bool, bool]:
    """The parts to run, each with what of it, [] for all of it and None for those that are not to run; whether models
    and rows are also compiled; and whether models are compiled before the first is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="tests/gpu, or these files of it")
    parser.add_argument("--sanitizer", nargs="*", metavar="TOOL", help=f"compute-sanitizer, or of {', '.join(TOOLS)}")
    parser.add_argument(
        "--benchmark", nargs="*", metavar="PATTERN", help="the kernels beside their peers; `host`, a tag"
    )
    parser.add_argument("--accuracy", nargs="*", metavar="KIND", help="errors beside PyTorch's own")
    parser.add_argument("--models", nargs="*", metavar="NAME", help="whole models of timm and transformers")
    parser.add_argument(
        "--eager", action="store_true", help="with --models and --benchmark: no torch.compile, which is slow"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="with --models: `check_models.py --compile-only` has run for them here and filled Inductor's cache",
    )
    found = vars(parser.parse_args(arguments))
    compiling, ahead = not found.pop("eager"), not found.pop("compiled")
    parts = found if any(value is not None for value in found.values()) else {part: [] for part in found}
    return parts, compiling, ahead


def main() -> None:
    wanted, compiling, ahead = asked()
    children.end_with_this_process()
    status = native.load(build=True)
    if not torch.cuda.is_available() or not status.available:
        raise SystemExit(f"gpu_check needs a CUDA device and the library: {status.reason}")
    nodes.load(compiling=True)
    checking = Checking(records.load(), records.RECORD, made_here())

    def beside() -> None:
        """Runs beside the tests, which take more of the host than of the device."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            tools = wanted["sanitizer"]
            sanitized = None if tools is None else pool.submit(checking.sanitizer, tools)
            if (kinds := wanted["accuracy"]) is not None:
                checking.accuracy(kinds)
            if sanitized is not None:
                sanitized.result()

    if (patterns := wanted["benchmark"]) is not None:
        checking.benchmark(patterns, compiling)
    if (names := wanted["models"]) is not None:
        checking.models(names, compiling, ahead)
    if (files := wanted["tests"]) is not None:
        checking.tests(files, beside)
    else:
        beside()
    print(f"wrote {records.RECORD}")
    sys.exit(checking.failed)


if __name__ == "__main__":
    main()
