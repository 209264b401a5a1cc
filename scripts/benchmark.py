"""Time the kernels: eager, torch.compile and normswap, interleaved in one run, verified first.

    python scripts/benchmark.py [--json FILE] [--shrink N] [--four]

Prints milliseconds (medians; the L2 is flushed or the inputs rotate through more memory than it holds; small sizes by
CUDA-graph replay, so that they are the device's time) and the share of the copy floor: the bytes that must move over
the rate of a large device-to-device copy, measured in the same run. The GEMM's floor is the Linear alone. Then the
host's time for a call of a small norm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from workloads import Workload, common_workloads, randomised, workloads

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


def replayed(functions: dict[str, Callable[[Tensor], object]], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The same of functions of a tensor by CUDA-graph replay: each input in turn, the mean of them."""
    graphs: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(inputs[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x in inputs:
                function(x)
        graphs[name] = graph.replay
    return {name: value / len(inputs) for name, value in interleaved(graphs).items()}


TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(one: Tensor, other: Tensor) -> bool:
    """assert_close's test in pieces that fit beside large tensors."""
    tolerance = TOLERANCE[one.dtype]
    pieces = zip(one.reshape(-1).split(2**26), other.reshape(-1).split(2**26), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pieces)


def measure(workload: Workload, training: bool, rate: float) -> dict[str, Any]:
    """One row: verify that ours equals eager's, then time."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(workload.precision)
    model = randomised(workload.make()).cuda().to(workload.dtype).train(training)
    x = torch.randn(workload.shape, device="cuda", dtype=workload.dtype)
    if x.dim() == 4:
        x = x.to(memory_format=workload.memory_format)
    gemm = workload.name == "linear_scale_batch_norm"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model, validate="off", on_empty="raise")
        fast = torch.compile(model)
        verified = close(swapped(x), model(x))
        functions: dict[str, Callable[[Tensor], object]] = {"eager": model, "normswap": swapped, "torch.compile": fast}
        if gemm:
            functions["linear alone"] = model.gemm
        if gemm or workload.floor_bytes > 2**30:
            times = interleaved({name: lambda f=f: f(x) for name, f in functions.items()})
        else:
            copies = max(1, min(64, 2**28 // workload.floor_bytes))
            times = replayed(functions, [x] + [x.clone() for _ in range(copies - 1)])
    torch.set_float32_matmul_precision("highest")
    return {
        "workload": workload.name,
        "shape": list(workload.shape),
        "what": workload.what,
        "mode": "train" if training else "eval",
        "verified": verified,
        "target_ms": workload.target_ms,
        "floor_ms": times.get("linear alone", workload.floor_bytes / rate),
        **{f"{name}_ms": value for name, value in times.items()},
    }


def host_costs(calls: int = 2000) -> list[dict[str, Any]]:
    """Microseconds of host time a call without gradients, by rounds of calls that the device finishes sooner."""
    rows = []
    for module, shape in ((nn.LayerNorm(256), (8, 256)), (nn.GroupNorm(8, 64), (2, 64, 8, 8))):
        model = randomised(module).cuda().eval()
        x = torch.randn(shape, device="cuda")
        swapped = normswap.optimize(model, validate="off", on_empty="raise")
        times: dict[str, list[float]] = {"eager": [], "normswap": []}
        with torch.no_grad():
            for _ in range(9):
                for name, function in (("eager", model), ("normswap", swapped)):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(calls):
                        function(x)
                    times[name].append((time.perf_counter() - start) / calls * 1e6)
        rows.append({"module": type(module).__name__, **{f"{k}_us": statistics.median(v) for k, v in times.items()}})
    return rows


def measure_all(shrink: int = 1, four: bool = False) -> dict[str, Any]:
    """Every row, with what they were measured on."""
    rate = copy_rate()
    rows = []
    for workload in workloads(shrink) + ([] if four else common_workloads(shrink)):
        for training in (False, True) if workload.name == "linear_scale_batch_norm" else (False,):
            rows.append(measure(workload, training, rate))
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "copy_GB_per_s": rate / 1e6,
        "rows": rows,
        "host": host_costs(),
    }


HEADERS = ("workload", "dtype", "floor", "eager", "compile", "normswap", "of floor", "vs eager", "vs compile", "target")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as a person reads it."""
    ours = row["normswap_ms"]
    target = row["target_ms"]
    digits = 4 if row["floor_ms"] < 0.1 else 3
    return (
        f"{row['workload']} {'x'.join(map(str, row['shape']))}{' train' if row['mode'] == 'train' else ''}",
        row["what"],
        *(f"{row[key]:.{digits}f}" for key in ("floor_ms", "eager_ms", "torch.compile_ms", "normswap_ms")),
        f"{row['floor_ms'] / ours:.0%}",
        f"{row['eager_ms'] / ours:.2f}x",
        f"{row['torch.compile_ms'] / ours:.2f}x",
        "-" if target is None else f"{target:g}, {'met' if ours <= target else 'missed'}",
    )


def table(found: dict[str, Any]) -> str:
    """The rows as a person reads them."""
    title = (
        f"{found['device']}, torch {found['torch']}, {found['date']}, copy {found['copy_GB_per_s']:.0f} GB/s, ms; "
        "the floor of linear_scale_batch_norm is the Linear alone"
    )
    host = tabulate(
        [(row["module"], f"{row['eager_us']:.1f}", f"{row['normswap_us']:.1f}") for row in found["host"]],
        ("host, us a call", "eager", "normswap"),
        disable_numparse=True,
    )
    wrong = [cells(row)[0] for row in found["rows"] if not row["verified"]]
    lines = tabulate([cells(row) for row in found["rows"]], HEADERS, disable_numparse=True)
    return "\n".join([title, lines, "", host, *(f"NOT EQUAL TO EAGER: {name}" for name in wrong)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch by this, to fit smaller GPUs")
    parser.add_argument("--four", action="store_true", help="only the four headline workloads")
    arguments = parser.parse_args()
    found = measure_all(arguments.shrink, arguments.four)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if not all(row["verified"] for row in found["rows"]):
        raise SystemExit("an output differs from eager's by more than the dtype's tolerance")


if __name__ == "__main__":
    main()
