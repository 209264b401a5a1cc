"""Time the kernels: eager, torch.compile, Liger and quack where installed, and normswap, interleaved in one run.

    python scripts/benchmark.py [PATTERN ...] [--eager | --compile-only] [--host] [--shrink N] [--json FILE]

First every swap is proved on the input that is timed, and what others make of it is compared with eager's. Prints
milliseconds of the device (medians; the L2 is flushed or the inputs rotate through more memory than it holds; by
CUDA-graph replay where a call takes less than a millisecond) and the share of the copy floor: the bytes that must move
over the rate of a large device-to-device copy, measured in the same run. ``copy`` is a copy of the same input, timed as
the rest. The GEMM's floor is the Linear alone. A PATTERN is a tag (headline, common, network, backward, batch_norms, a
network's name) or a glob over what a row is called.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import host_cost
import torch
from ahead import compile_ahead
from device_time import copy_rate, interleaved, replayed
from networks import backward_workloads, batch_norm_workloads, network_workloads
from peers import Offer, peers, versions
from tabulate import tabulate
from torch import Tensor, nn
from workloads import Workload, common_workloads, randomised, workloads

import normswap
from normswap import native, nodes

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
REPLAYED_BYTES = 2**31
"""Of calls that move less, as many are replayed at once as move that much, at most MOST_COPIES."""
MOST_COPIES = 64
SLOWER = 1.02
"""What counts as slower than torch.compile: the same code twice differs by that much."""
LAYOUTS = 1.25
"""What channels_last may cost beside NCHW."""

AHEAD, AHEAD_BYTES = 8, 2**31
"""How many processes compile ahead, and what a row may move that they take."""

Function = Callable[[Tensor], Any]


def close(one: Tensor, other: Tensor) -> bool:
    """assert_close's test in pieces that fit beside large tensors."""
    tolerance = TOLERANCE[one.dtype]
    pieces = zip(one.reshape(-1).split(2**26), other.reshape(-1).split(2**26), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pieces)


@contextlib.contextmanager
def made(workload: Workload) -> Iterator[tuple[nn.Module, Tensor]]:
    """The model and its input, in the mode in which they are timed."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(workload.precision)
    model = randomised(workload.make()).cuda().to(workload.weights_dtype).train(workload.training)
    x = drawn(workload)
    if workload.shortcut:
        model.shortcut = nn.Parameter(drawn(workload).detach(), requires_grad=workload.backward)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=workload.autocast)
    with warnings.catch_warnings(), torch.set_grad_enabled(workload.backward), autocast:
        warnings.simplefilter("ignore", UserWarning)
        try:
            yield model, x
        finally:
            torch.set_float32_matmul_precision("highest")


def compile_once(workload: Workload) -> None:
    """Compile a row's model, which leaves the code in Inductor's cache on the disk."""
    with made(workload) as (model, x):
        compiled: Any = torch.compile(model)
        (with_backward(compiled, x) if workload.backward else compiled)(x)


def measure(workload: Workload, rate: float, compiling: bool = True) -> dict[str, Any]:
    """One row: prove ours, compare the peers with eager, then time all of them, torch.compile if ``compiling``."""
    with made(workload) as (model, x):
        swapped, proof = proved(model, x, workload.backward)
        others, cannot = compared({} if workload.backward else peers(workload), model, x)
        torch.cuda.empty_cache()
        compiled = {"torch.compile": torch.compile(model)} if compiling else {}
        functions = {"eager": model, **compiled, "normswap": swapped, **others}
        times = timed(workload, functions, model, x)
    floor = times["linear alone"] if workload.of_linear else workload.floor_bytes / rate
    row = {
        "workload": workload.name,
        "shape": list(workload.shape),
        "what": workload.what,
        "mode": workload.mode,
        "tags": sorted(workload.tags),
        **proof,
        "target": str(workload.target),
        "target_ms": workload.target.limit_ms(floor, times),
        "floor_ms": floor,
        "cannot": cannot,
    }
    times.pop("linear alone", None)
    return {**row, "ms": times}


def drawn(workload: Workload) -> Tensor:
    x = torch.randn(workload.shape, device="cuda", dtype=workload.dtype)
    if x.dim() == 4:
        x = x.to(memory_format=workload.memory_format)
    return x.requires_grad_(workload.backward)


def timed(workload: Workload, functions: dict[str, Any], model: Any, x: Tensor) -> dict[str, float]:
    """Milliseconds of each of ``functions``, and of a copy of the input; beside a GEMM, of the Linear alone instead."""
    beside: dict[str, Any] = {"linear alone": model.gemm} if workload.of_linear else {}
    if workload.backward:
        functions = {name: with_backward(function, x) for name, function in (beside | functions).items()}
        copied: dict[str, Function] = {} if workload.of_linear else {"copy": lambda x: x.detach().clone()}
        return interleaved({name: lambda f=f: f(x) for name, f in (copied | functions).items()})
    functions = (beside or {"copy": torch.clone}) | functions
    copies = 1 if workload.of_linear else max(1, min(MOST_COPIES, REPLAYED_BYTES // workload.floor_bytes))
    if copies == 1:
        return interleaved({name: lambda f=f: f(x) for name, f in functions.items()})
    return replayed(functions, [x] + [x.clone() for _ in range(copies - 1)])


def with_backward(function: nn.Module, x: Tensor) -> Function:
    """A forward of ``function`` and the gradients for ``x`` and all its parameters, from one random cotangent."""
    wanted = [x, *function.parameters()]
    cotangent = torch.randn_like(function(x))
    return lambda x: torch.autograd.grad(function(x), wanted, cotangent)


def proved(model: nn.Module, x: Tensor, gradients: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model swapped, whether each site was proved on ``x``, with the worst errors as shares of their limit, why
    sites were not swapped, and of those that were not proved why, and what a second proof on ``x`` says."""
    options = {"validate": "grad" if gradients else "forward", "on_empty": "warn", "on_mismatch": "warn"}
    swapped = normswap.optimize(model, x, min_speedup=None, **options)
    rows = normswap.report(swapped).rows
    sites = [row for row in rows if row["status"] != "refused"]
    unproved = [f"{row['status']} {row['detail']}".strip() for row in sites if row["status"] != "proved"]
    if unproved:
        normswap.validate(swapped, x, mode=options["validate"], on_mismatch="warn")
        again = {row["status"] for row in normswap.report(swapped).rows if row["status"] != "refused"}
        unproved += [f"on the same input again: {', '.join(sorted(again))}"]
    return swapped, {
        "sites": len(sites),
        "verified": bool(sites) and all(row["status"] == "proved" for row in sites),
        "refused": sorted({row["reason"] for row in rows if row["status"] == "refused"}),
        "unproved": unproved,
        "error_share": max((row["error_share"] for row in sites), default=0.0),
        "eager_error_share": max((row["eager_error_share"] for row in sites), default=0.0),
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


def all_workloads(shrink: int = 1) -> list[Workload]:
    """Every row, in the order of the tables."""
    return [
        *(*workloads(shrink), *common_workloads(shrink)),
        *(*network_workloads(shrink), *backward_workloads(shrink), *batch_norm_workloads(shrink)),
    ]


def chosen(patterns: Sequence[str], shrink: int = 1) -> list[Workload]:
    """Those that one of the patterns fits; all without any. Raises SystemExit for a pattern that fits none."""
    found = all_workloads(shrink)
    if idle := [pattern for pattern in patterns if not any(one.fits(pattern) for one in found)]:
        raise SystemExit(f"no row of the benchmark is called {', '.join(idle)}")
    return [one for one in found if not patterns or any(one.fits(pattern) for pattern in patterns)]


def measured(
    these: Sequence[Workload], rate: float, compiling: bool = True, ahead: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of these workloads, as they end. ``ahead``: of more than a few the code of torch.compile is made first,
    but of those that would not find memory side by side."""
    small = [one.called for one in these if one.floor_bytes <= AHEAD_BYTES]
    if compiling and ahead and len(small) > AHEAD:
        compile_ahead("benchmark.py", [small[first::AHEAD] for first in range(AHEAD)], AHEAD)
    for workload in these:
        yield measure(workload, rate, compiling)
        torch.cuda.empty_cache()


def machine(rate: float) -> dict[str, Any]:
    """What a benchmark was measured on."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peers": versions(),
        "date": datetime.date.today().isoformat(),
        "copy_GB_per_s": rate / 1e6,
    }


# --- what the rows say ------------------------------------------------------------------------------------------------


def title(row: dict[str, Any]) -> str:
    """What a row measures, without its dtype."""
    return f"{row['workload']} {'x'.join(map(str, row['shape']))}{'' if row['mode'] == 'eval' else ' ' + row['mode']}"


def met(row: dict[str, Any]) -> bool:
    """Whether a row that has a target meets it."""
    return bool(row["ms"]["normswap"] <= row["target_ms"])


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How many targets are met, the headline rows more than 10% beyond theirs, and rows that lose to PyTorch's."""
    rows = list(rows)
    aimed = [row for row in rows if row["target_ms"] is not None]
    headline = [row for row in aimed if "headline" in row["tags"]]

    def named(chosen: Iterable[dict[str, Any]]) -> list[str]:
        return [f"{title(row)} {row['what']}" for row in chosen]

    return {
        "targets": len(aimed),
        "met": sum(met(row) for row in aimed),
        "headline_beyond_10%": named(row for row in headline if row["ms"]["normswap"] > 1.1 * row["target_ms"]),
        "slower_than_eager": named(r for r in rows if r["ms"]["normswap"] > r["ms"]["eager"]),
        "slower_than_compile": named(
            r for r in rows if r["ms"]["normswap"] > SLOWER * r["ms"].get("torch.compile", float("inf"))
        ),
        "beyond_the_other_layout": named(_slow_in_channels_last(rows)),
        "not_swapped": named(r for r in rows if not r["sites"]),
        "not_proved": named(r for r in rows if r["sites"] and not r["verified"]),
    }


def _slow_in_channels_last(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows in channels_last that take more than LAYOUTS times what the same ones take as NCHW."""

    def key(row: dict[str, Any]) -> tuple[object, ...]:
        return row["workload"], tuple(row["shape"]), row["what"].replace(", channels_last", ""), row["mode"]

    rows = list(rows)
    contiguous = {key(row): row["ms"]["normswap"] for row in rows if "channels_last" not in row["what"]}
    for row in rows:
        if "channels_last" in row["what"] and row["ms"]["normswap"] > LAYOUTS * contiguous.get(key(row), float("inf")):
            yield row


def told(found: dict[str, Any]) -> list[str]:
    """The summary in sentences."""
    lists = (
        ("Headline rows more than 10% beyond their target", "headline_beyond_10%"),
        ("Slower than eager", "slower_than_eager"),
        (f"More than {SLOWER - 1:.0%} slower than torch.compile", "slower_than_compile"),
        (f"In channels_last more than {LAYOUTS} times as long as in NCHW", "beyond_the_other_layout"),
        ("Not swapped", "not_swapped"),
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
        title(row) + (f" ({row['note']})" if row.get("note") else ""),
        row["what"],
        f"{row['floor_ms']:.{digits}f}",
        *(f"{times[name]:.{digits}f}" if name in times else "-" for name in names),
        f"{row['floor_ms'] / ours:.0%}",
        f"{times['eager'] / ours:.2f}x",
        f"{times['torch.compile'] / ours:.2f}x" if "torch.compile" in times else "-",
        row["target"] if target is None else f"{row['target']}: {'met' if met(row) else 'missed'}",
    )


def table(rows: list[dict[str, Any]], host: Iterable[dict[str, Any]] = ()) -> str:
    """Rows, the host's costs and what is to be said of them, as a person reads it; milliseconds."""
    names = columns(rows)
    lines = [tabulate([cells(row, names) for row in rows], headers(rows), disable_numparse=True)]
    if costs := list(map(host_cost.cells, host)):
        lines += ["", tabulate(costs, ("host, us a call", *host_cost.HEADERS[1:]), disable_numparse=True)]
    cannot = [f"{title(row)}: {name}: {why}" for row in rows for name, why in row["cannot"].items()]
    refused = [f"{title(row)}: not swapped: {why}" for row in rows for why in row["refused"]]
    unproved = [f"{title(row)}: not proved: {why}" for row in rows for why in row.get("unproved", ())]
    return "\n".join([*lines, *cannot, *refused, *unproved, *told(summary(rows))])


def where(on: dict[str, Any]) -> str:
    """What a benchmark was measured on, in words."""
    peers = "".join(f", {name} {version}" for name, version in on["peers"].items())
    return (
        f"one {on['device']}, torch {on['torch']}{peers}, {on['date']}, a copy rate of {on['copy_GB_per_s']:.0f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="rows whose tag or name this is; default: all")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, which is slow to compile")
    parser.add_argument(
        "--compile-only", action="store_true", help="fill Inductor's cache for the rows called exactly so, no more"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--shrink", type=int, default=1, help="divide the batch by this, to fit smaller GPUs")
    parser.add_argument("--host", action="store_true", help="also the host's time for a call of small modules")
    arguments = parser.parse_args()
    if arguments.compile_only:
        for one in all_workloads():
            if one.called in arguments.patterns:
                compile_once(one)
                torch.cuda.empty_cache()
        return
    status = native.load(build=True)
    if not status.available:
        raise SystemExit(f"the benchmark needs a CUDA device and the library: {status.reason}")
    nodes.load(compiling=True)
    these, rate = chosen(arguments.patterns, arguments.shrink), copy_rate()
    rows = list(measured(these, rate, not arguments.eager, ahead=arguments.shrink == 1))
    on = machine(rate)
    host = host_cost.on_the_gpu() if arguments.host else []
    print(where(on))
    print(table(rows, host))
    if arguments.json:
        arguments.json.write_text(json.dumps({**on, "rows": rows, "host": host}, indent=2) + "\n")
    if summary(rows)["not_proved"]:
        raise SystemExit("not all was proved")


if __name__ == "__main__":
    main()
