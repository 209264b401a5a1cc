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
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import readme_tables
import torch

from normswap import native

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
KERNEL_TESTS = [f"tests/gpu/test_{name}.py" for name in ("row_norm", "channel_norm", "dim_norm")]
SANITIZED = "layouts or test_empty or special_values or non_finite or group_norm_without or affine_shapes or test_fold"
ALONE = ("test_workloads.py", "test_cost.py")
"""Test files that time, or need most of the GPU's memory."""
AT_ONCE = 8


def run_tests() -> dict[str, int]:
    """How many of tests/gpu passed, failed and were skipped: a process a file, several at once. Prints what fails."""
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    together = [file for file in files if file.name not in ALONE]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        counts = list(pool.map(_run_file, together))
    counts += [_run_file(file) for file in files if file.name in ALONE]
    return {outcome: sum(count[outcome] for count in counts) for outcome in ("passed", "failed", "skipped")}


def _run_file(file: Path) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        tests = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"== {file.name}: exit {done.returncode}\n{done.stdout[-5000:]}{done.stderr[-1000:]}", flush=True)
        if not results.is_file():
            raise SystemExit(f"{file.name}: pytest ended with {done.returncode} and no results")
        suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - skipped - failed, "failed": failed, "skipped": skipped}


def run_sanitizer(tool: str) -> dict[str, Any]:
    """compute-sanitizer over the tests that sweep regimes and edges."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return {"tool": tool, "result": "compute-sanitizer not found"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *KERNEL_TESTS, "-k", SANITIZED]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", tool, "--error-exitcode", "99", "--kernel-name", "kns=normswap", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    told = ("ERROR SUMMARY", "passed", "failed")
    summary = [line for line in done.stdout.splitlines() if any(word in line for word in told)]
    return {"tool": tool, "exit": done.returncode, "result": "; ".join(summary) or done.stdout[-500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="tests/gpu")
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer memcheck and racecheck")
    parser.add_argument("--benchmark", action="store_true", help="time the four workloads")
    parser.add_argument("--models", action="store_true", help="whole models of timm and transformers")
    chosen = parser.parse_args()
    everything = not any(vars(chosen).values())
    status = native.load(build=True)
    if not torch.cuda.is_available() or not status.available:
        raise SystemExit(f"gpu_check needs a CUDA device and the library: {status.reason}")
    digest = readme_tables.kernel_digest()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if record.get("kernel_sources") != digest:
        record = {}
    record |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": native.driver_cuda(),
        "date": datetime.date.today().isoformat(),
        "kernel_sources": digest,
    }
    failed = False
    if chosen.benchmark or everything:
        import benchmark

        record["benchmark"] = benchmark.measure_all()
        print(benchmark.table(record["benchmark"]), flush=True)
        failed |= not all(row["verified"] for row in record["benchmark"]["rows"])
    if chosen.models or everything:
        import check_models

        record["models"] = check_models.check_all()
        print(check_models.table(record["models"]), flush=True)
        failed |= any(row["problems"] for row in record["models"])
    if chosen.tests or everything:
        record["tests"] = run_tests()
        failed |= bool(record["tests"]["failed"])
    if chosen.sanitizer or everything:
        record["sanitizer"] = [run_sanitizer(tool) for tool in ("memcheck", "racecheck")]
        print(*record["sanitizer"], sep="\n", flush=True)
        failed |= any(row.get("exit") != 0 for row in record["sanitizer"])
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {RECORD}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
