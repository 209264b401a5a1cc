"""Time the kernels: eager, torch.compile, Liger and quack where installed, and normswap, interleaved in one run.

    python scripts/benchmark.py [--json FILE] [--shrink N] [--four]

First every swap is proved on the input that is timed, and what others make of it is compared with eager's. Prints
milliseconds of the device (medians; the L2 is flushed or the inputs rotate through more memory than it holds; by
CUDA-graph replay where a call takes less than a millisecond) and the share of the copy floor: the bytes that must move
over the rate of a large device-to-device copy, measured in the same run. ``copy`` is a copy of the same input, timed as
the rest. The GEMM's floor is the Linear alone. Then the host's time for a call of small modules.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from device_time import copy_rate, interleaved, replayed
from peers import Offer, peers, versions
from tabulate import tabulate
from torch import Tensor, nn
from workloads import L1Norm, LinearScaleBatchNorm, Workload, common_workloads, randomised, workloads

import normswap
from normswap import native

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
REPLAYED_BYTES = 2**31
"""Of calls that move less, as many are replayed at once as move that much, at most MOST_COPIES."""
MOST_COPIES = 64
SLOWER = 1.03
"""What counts as slower than torch.compile: the same code twice differs by that much."""

Function = Callable[[Tensor], Any]


def close(one: Tensor, other: Tensor) -> bool:
    """assert_close's test in pieces that fit beside large tensors."""
    tolerance = TOLERANCE[one.dtype]
    pieces = zip(one.reshape(-1).split(2**26), other.reshape(-1).split(2**26), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pieces)


def measure(workload: Workload, rate: float) -> dict[str, Any]:
    """One row: prove ours, compare the peers with eager, then time all of them."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(workload.precision)
    model = randomised(workload.make()).cuda().to(workload.dtype).train(workload.training)
    x = torch.randn(workload.shape, device="cuda", dtype=workload.dtype)
    if x.dim() == 4:
        x = x.to(memory_format=workload.memory_format)
    gemm = workload.of_linear is not None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)
        swapped, proof = proved(model, x)
        others, cannot = compared(peers(workload), model, x)
        torch.cuda.empty_cache()
        functions: dict[str, Function] = {"linear alone": model.gemm} if gemm else {"copy": torch.clone}
        functions |= {"eager": model, "torch.compile": torch.compile(model), "normswap": swapped, **others}
        copies = 1 if gemm else max(1, min(MOST_COPIES, REPLAYED_BYTES // workload.floor_bytes))
        if copies == 1:
            times = interleaved({name: lambda f=f: f(x) for name, f in functions.items()})
        else:
            times = replayed(functions, [x] + [x.clone() for _ in range(copies - 1)])
    torch.set_float32_matmul_precision("highest")
    linear = times.pop("linear alone", None)
    return {
        "workload": workload.name,
        "shape": list(workload.shape),
        "what": workload.what,
        "mode": "train" if workload.training else "eval",
        **proof,
        "target_ms": workload.target(linear),
        "floor_ms": workload.floor_bytes / rate if linear is None else linear,
        "ms": times,
        "cannot": cannot,
    }


def proved(model: nn.Module, x: Tensor) -> tuple[nn.Module, dict[str, Any]]:
    """The model swapped, and whether each site was proved on ``x``, with the worst errors as shares of their limit."""
    options = {"validate": "forward", "on_empty": "raise", "on_mismatch": "warn", "min_speedup": None}
    swapped = normswap.optimize(model, x, **options)
    sites = [row for row in normswap.report(swapped).rows if row["status"] != "refused"]
    return swapped, {
        "verified": all(row["status"] == "proved" for row in sites),
        "error_share": max(row["error_share"] for row in sites),
        "eager_error_share": max(row["eager_error_share"] for row in sites),
    }


def compared(offers: dict[str, Offer], model: nn.Module, x: Tensor) -> tuple[dict[str, Function], dict[str, str]]:
    """What the peers offer for the model and equals it on ``x``, and why the others are not timed."""
    right: dict[str, Function] = {}
    cannot = {}
    for name, offer in offers.items():
        try:
            function = offer(model)
            found = None if function is None else function(x)
        except Exception as error:  # a package may raise anything on a size that it does not serve
            cannot[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            continue
        if found is not None and close(found, model(x)):
            right[name] = function
        elif found is not None:
            cannot[name] = "differs from eager"
    return right, cannot


HOST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(256), (8, 256)),
    "nn.RMSNorm": (lambda: nn.RMSNorm(256, eps=1e-6), (8, 256)),
    "nn.GroupNorm": (lambda: nn.GroupNorm(8, 64), (2, 64, 8, 8)),
    "L1 norm": (L1Norm, (8, 256)),
    "Linear, scale, BatchNorm": (lambda: LinearScaleBatchNorm(64, 64), (256, 64)),
}


def host_costs(calls: int = 500, rounds: int = 15) -> list[dict[str, Any]]:
    """Microseconds of host time for a forward call in eval, medians over rounds of calls that the device finishes
    sooner: under no_grad, and without it, where the parameters require gradients."""
    rows = []
    for name, (make, shape) in HOST.items():
        model = randomised(make()).cuda().eval()
        x = torch.randn(shape, device="cuda")
        functions = {"eager": model, "normswap": normswap.optimize(model, validate="off", on_empty="raise")}
        for gradients in (False, True) if list(model.parameters()) else (False,):
            times: dict[str, list[float]] = {key: [] for key in functions}
            with torch.set_grad_enabled(gradients):
                for _ in range(rounds):
                    for key, function in functions.items():
                        times[key].append(_host_us(function, x, calls))
            medians = {f"{key}_us": statistics.median(found) for key, found in times.items()}
            rows.append({"module": name, "gradients": gradients, **medians})
    return rows


def _host_us(function: Function, x: Tensor, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(x)
    return (time.perf_counter() - start) / calls * 1e6


def measure_all(shrink: int = 1, four: bool = False) -> dict[str, Any]:
    """Every row, with what they were measured on."""
    started, rate, rows = time.monotonic(), copy_rate(), []
    for headline, chosen in ((True, workloads(shrink)), (False, [] if four else common_workloads(shrink))):
        for workload in chosen:
            rows.append({**measure(workload, rate), "headline": headline})
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peers": versions(),
        "date": datetime.date.today().isoformat(),
        "copy_GB_per_s": rate / 1e6,
        "rows": rows,
        "summary": summary(rows),
        "host": host_costs(),
        "seconds": round(time.monotonic() - started),
    }


# --- what the rows say ------------------------------------------------------------------------------------------------


def title(row: dict[str, Any]) -> str:
    """What a row measures, without its dtype."""
    return f"{row['workload']} {'x'.join(map(str, row['shape']))}{' train' if row['mode'] == 'train' else ''}"


def met(row: dict[str, Any]) -> bool:
    """Whether a row that has a target meets it."""
    return bool(row["ms"]["normswap"] <= row["target_ms"])


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How many targets are met, the headline rows more than 10% beyond theirs, and rows that lose to PyTorch's."""
    rows = list(rows)
    aimed = [row for row in rows if row["target_ms"] is not None]

    def named(chosen: Iterable[dict[str, Any]]) -> list[str]:
        return [f"{title(row)} {row['what']}" for row in chosen]

    return {
        "targets": len(aimed),
        "met": sum(met(row) for row in aimed),
        "headline_beyond_10%": named(r for r in aimed if r["headline"] and r["ms"]["normswap"] > 1.1 * r["target_ms"]),
        "slower_than_eager": named(r for r in rows if r["ms"]["normswap"] > r["ms"]["eager"]),
        "slower_than_compile": named(r for r in rows if r["ms"]["normswap"] > SLOWER * r["ms"]["torch.compile"]),
        "not_proved": named(r for r in rows if not r["verified"]),
    }


def told(found: dict[str, Any]) -> list[str]:
    """The summary in sentences."""
    lists = (
        ("Headline rows more than 10% beyond their target", "headline_beyond_10%"),
        ("Slower than eager", "slower_than_eager"),
        ("More than 3% slower than torch.compile", "slower_than_compile"),
        ("Not proved", "not_proved"),
    )
    return [
        f"{found['met']} of {found['targets']} targets met.",
        *(f"{words}: {', '.join(found[key]) or 'none'}." for words, key in lists),
    ]


def columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Whose times there are, ours last."""
    seen = dict.fromkeys(name for row in rows for name in row["ms"])
    return [*(name for name in seen if name != "normswap"), "normswap"]


def headers(rows: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    return ("workload", "dtype", "floor", *columns(rows), "of floor", "vs eager", "vs compile", "target")


def cells(row: dict[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """A row as a person reads it, with the times of ``names``."""
    times, target = row["ms"], row["target_ms"]
    ours, digits = times["normswap"], 4 if row["floor_ms"] < 0.1 else 3
    return (
        title(row),
        row["what"],
        f"{row['floor_ms']:.{digits}f}",
        *(f"{times[name]:.{digits}f}" if name in times else "-" for name in names),
        f"{row['floor_ms'] / ours:.0%}",
        f"{times['eager'] / ours:.2f}x",
        f"{times['torch.compile'] / ours:.2f}x",
        "-" if target is None else f"{target:.{digits}f}, {'met' if met(row) else 'missed'}",
    )


def host_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return row["module"], "yes" if row["gradients"] else "no", f"{row['eager_us']:.1f}", f"{row['normswap_us']:.1f}"


HOST_HEADERS = ("module", "gradients", "eager", "normswap")


def table(found: dict[str, Any]) -> str:
    """All of it as a person reads it."""
    rows = found["rows"]
    head = (
        f"{found['device']}, torch {found['torch']}, {found['date']}, copy {found['copy_GB_per_s']:.0f} GB/s, ms; "
        f"the floor of linear_scale_batch_norm is the Linear alone; {found['seconds']} s"
    )
    names = columns(rows)
    lines = tabulate([cells(row, names) for row in rows], headers(rows), disable_numparse=True)
    host = tabulate(map(host_cells, found["host"]), ("host, us a call", *HOST_HEADERS[1:]), disable_numparse=True)
    cannot = [f"{title(row)}: {name}: {why}" for row in rows for name, why in row["cannot"].items()]
    return "\n".join([head, lines, "", host, *cannot, *told(found["summary"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch by this, to fit smaller GPUs")
    parser.add_argument("--four", action="store_true", help="only the four headline workloads")
    arguments = parser.parse_args()
    status = native.load(build=True)
    if not status.available:
        raise SystemExit(f"the benchmark needs a CUDA device and the library: {status.reason}")
    found = measure_all(arguments.shrink, arguments.four)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["summary"]["not_proved"]:
        raise SystemExit("not all was proved")


if __name__ == "__main__":
    main()
