"""What scripts/gpu_check runs; see there."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import readme_tables
import torch

from normswap import native

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
SANITIZED = "test_layouts or test_empty or special_values or group_norm_without or affine_shapes or test_fold"


class Outcomes:
    """Counts test outcomes."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def run_tests() -> dict[str, int]:
    outcomes = Outcomes()
    code = pytest.main([str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider"], plugins=[outcomes])
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")
    return outcomes.counts


def run_sanitizer(tool: str) -> dict[str, Any]:
    """compute-sanitizer over the tests that sweep regimes and edges."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return {"tool": tool, "result": "compute-sanitizer not found"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", SANITIZED]
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
