"""Time the four workloads: eager, torch.compile and normswap, interleaved in one run, verified first.

    python scripts/benchmark.py [--json FILE] [--shrink N]

Prints milliseconds (median of CUDA-event timings, L2 flushed before each) and the share of the copy floor: the bytes
that must move over the rate of a large device-to-device copy, measured in the same run. The GEMM's floor is the Linear
alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from workloads import Workload, randomised, workloads

import normswap

ROUNDS = 12


def interleaved(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each function, called in turn; the L2 is overwritten before every call."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(2):
            function()
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def copy_rate() -> float:
    """Bytes per millisecond of a 4 GB device-to-device copy, read plus written."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / interleaved({"copy": lambda: target.copy_(source)})["copy"]


def close(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    """assert_close's test in pieces that fit beside large tensors."""
    pieces = zip(one.reshape(-1).split(2**26), other.reshape(-1).split(2**26), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pieces)


def measure(workload: Workload, training: bool, rate: float, compiled: bool = True) -> dict[str, Any]:
    """One row: verify that ours equals eager to 1e-4, then time."""
    torch._dynamo.reset()
    model = randomised(workload.make()).cuda().train(training)
    x = torch.randn(workload.shape, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model, validate="off")
        with torch.no_grad():
            verified = close(swapped(x), model(x))
            functions: dict[str, Callable[[], object]] = {"eager": lambda: model(x), "normswap": lambda: swapped(x)}
            if compiled:
                fast = torch.compile(model)
                functions["torch.compile"] = lambda: fast(x)
            if workload.name == "linear_scale_batch_norm":
                functions["linear alone"] = lambda: model.gemm(x)
            times = interleaved(functions)
    floor = times.get("linear alone", workload.floor_bytes / rate)
    return {
        "workload": workload.name,
        "shape": list(workload.shape),
        "mode": "train" if training else "eval",
        "verified": verified,
        "floor_ms": floor,
        **{f"{name}_ms": value for name, value in times.items()},
    }


def measure_all(shrink: int = 1) -> dict[str, Any]:
    """Every row, with what they were measured on."""
    rate = copy_rate()
    rows = []
    for workload in workloads(shrink):
        for training in (False, True) if workload.name == "linear_scale_batch_norm" else (False,):
            rows.append(measure(workload, training, rate))
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "copy_GB_per_s": rate / 1e6,
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    """The rows as a person reads them."""
    lines = [
        (
            f"{row['workload']} {'x'.join(map(str, row['shape']))} {row['mode']}",
            *(f"{row[key]:.3f}" for key in ("floor_ms", "eager_ms", "torch.compile_ms", "normswap_ms")),
            f"{row['floor_ms'] / row['normswap_ms']:.0%}",
            f"{row['eager_ms'] / row['normswap_ms']:.2f}x",
            f"{row['torch.compile_ms'] / row['normswap_ms']:.2f}x",
            "yes" if row["verified"] else "NO",
        )
        for row in found["rows"]
    ]
    headers = (
        "float32, ms",
        "floor",
        "eager",
        "compile",
        "normswap",
        "of floor",
        "vs eager",
        "vs compile",
        "equal to 1e-4",
    )
    title = (
        f"{found['device']}, torch {found['torch']}, {found['date']}, copy {found['copy_GB_per_s']:.0f} GB/s; "
        "the floor of linear_scale_batch_norm is the Linear alone"
    )
    return f"{title}\n{tabulate(lines, headers, disable_numparse=True)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch by this, to fit smaller GPUs")
    arguments = parser.parse_args()
    found = measure_all(arguments.shrink)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if not all(row["verified"] for row in found["rows"]):
        raise SystemExit("an output differs from eager's by more than 1e-4")


if __name__ == "__main__":
    main()
