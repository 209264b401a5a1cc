"""What scripts/gpu_check runs; see there."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import readme_tables
import torch

from normswap import native

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
SANITIZED = "tests/gpu/test_sanitized_sweep.py"
TOOLS = ("memcheck", "racecheck")
ALONE = ("test_workloads.py", "test_cost.py")
"""Test files that time, or need most of the GPU's memory."""
AT_ONCE = 8

Told = dict[str, dict[str, float]]
"""Figures by test and name."""


def run_tests(
    only: list[str], before: dict[str, Any], beside: Callable[[], None], keep: Callable[[dict[str, Any], Told], None]
) -> None:
    """Hand to ``keep``, whenever a file has ended, how many of tests/gpu (or of the files named ``only``; the others'
    are those of ``before``) passed, failed and were skipped, which files have not ended, and what tests told by
    record_property. A process a file, several at once and ``beside`` with them, but none beside those that time;
    those that took longest before start first. Prints what fails; raises what ``beside`` does, in the end."""
    earlier = before.get("files", {})
    took = {name: found["seconds"] for name, found in earlier.items()}
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda file: -took.get(file.name, 1e9))
    if unknown := set(only) - {file.name for file in files}:
        raise SystemExit(f"no such file in tests/gpu: {', '.join(sorted(unknown))}")
    counts = {name: found for name, found in earlier.items() if only and name not in only}
    files = [file for file in files if not only or file.name in only]
    awaited = {*(before.get("unfinished", ()) if only else ()), *(file.name for file in files)}
    told: Told = {}

    def ended(file: Path, found: tuple[dict[str, Any], Told]) -> None:
        counts[file.name] = found[0]
        told.update({f"{file.stem}: {test}": figures for test, figures in found[1].items()})
        totals = {outcome: sum(one[outcome] for one in counts.values()) for outcome in ("passed", "failed", "skipped")}
        unfinished = sorted(awaited - set(counts))
        keep({**totals, "files": dict(sorted(counts.items())), "unfinished": unfinished}, dict(sorted(told.items())))

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool, concurrent.futures.ThreadPoolExecutor(1) as aside:
        running = {pool.submit(_run_file, file): file for file in files if file.name not in ALONE}
        also = aside.submit(beside)
        for done in concurrent.futures.as_completed(running):
            ended(running[done], done.result())
    for file in files:
        if file.name in ALONE:
            ended(file, _run_file(file))
    also.result()


def _run_file(file: Path) -> tuple[dict[str, Any], Told]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        told = ["-o", "junit_family=xunit1", f"--junitxml={results}"]  # xunit2 has no properties
        tests = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", *told]
        done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
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
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SANITIZED]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", tool, "--error-exitcode", "99", "--kernel-name", "kns=normswap", *tests]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    told = ("SUMMARY", "passed", "failed")
    summary = [line.strip("= ") for line in done.stdout.splitlines() if any(word in line for word in told)]
    result = "; ".join(summary) if done.returncode == 0 else f"{done.stdout[:3000]} [...] {done.stdout[-500:]}"
    return {"tool": tool, "exit": done.returncode, "seconds": round(time.monotonic() - started), "result": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="*", metavar="FILE", help="tests/gpu, or these files of it once more")
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer memcheck and racecheck")
    parser.add_argument("--benchmark", action="store_true", help="time the kernels beside their peers")
    parser.add_argument("--accuracy", action="store_true", help="errors beside PyTorch's own")
    parser.add_argument("--models", nargs="*", metavar="MODEL", help="whole models of timm and transformers, or these")
    parser.add_argument("--eager", action="store_true", help="with --models: without torch.compile, which is slow")
    chosen = parser.parse_args()
    everything = all(value in (None, False) for value in vars(chosen).values())
    status = native.load(build=True)
    if not torch.cuda.is_available() or not status.available:
        raise SystemExit(f"gpu_check needs a CUDA device and the library: {status.reason}")
    digest = readme_tables.kernel_digest()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    tests_before = record.get("tests", {})
    if record.get("kernel_sources") != digest:  # the benchmark says of which kernels it is
        record = {"benchmark": record["benchmark"]} if "benchmark" in record else {}
    record |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": native.driver_cuda(),
        "date": datetime.date.today().isoformat(),
        "kernel_sources": digest,
    }
    failed, one_at_a_time = False, threading.Lock()

    def add(**sections: Any) -> None:
        """Written after every section, so that what was found is kept if a later one is cut short."""
        with one_at_a_time, tempfile.TemporaryDirectory(dir=RECORD.parent) as folder:
            record.update(sections)
            written = Path(folder, RECORD.name)
            written.write_text(json.dumps(record, indent=2) + "\n")
            written.replace(RECORD)

    if chosen.benchmark or everything:
        import benchmark

        found = benchmark.measure_all()
        add(benchmark={**found, "kernel_sources": digest})
        print(benchmark.table(found), flush=True)
        failed |= bool(found["summary"]["not_proved"])
    if chosen.models is not None or everything:
        import check_models

        rows = check_models.check_all(chosen.models or (), not chosen.eager)
        fresh = {row["model"] for row in rows}
        add(models=[*(row for row in record.get("models", ()) if row["model"] not in fresh), *rows])
        print(check_models.table(rows), flush=True)
        failed |= any(row["problems"] for row in rows)

    def beside() -> None:
        nonlocal failed
        with concurrent.futures.ThreadPoolExecutor(len(TOOLS)) as pool:
            sanitized = pool.map(run_sanitizer, TOOLS if chosen.sanitizer or everything else ())
            if chosen.accuracy or everything:
                import accuracy

                errors = accuracy.measure_all()
                add(errors=errors)
                print(accuracy.table(errors), flush=True)
                failed |= bool(accuracy.beyond(errors))
            if chosen.sanitizer or everything:
                runs = list(sanitized)
                add(sanitizer=runs)
                print(*runs, sep="\n", flush=True)
                failed |= any(run.get("exit") != 0 for run in runs)

    if chosen.tests is not None or everything:
        only = chosen.tests or []

        def keep(tests: dict[str, Any], told: Told) -> None:
            add(tests=tests, proof=record.get("proof", {}) | told)

        run_tests(only, record.get("tests", {}) if only else tests_before, beside, keep)
        failed |= bool(record["tests"]["failed"])
    else:
        beside()
    print(f"wrote {RECORD}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
