"""Whole models of timm and transformers, and others like them, on the GPU: every promise that shows from outside, and
what a user waits for a run in eager mode, optimized by default, with everything swapped, and both compiled.

Exit 0 only if every norm is swapped or refused with a reason, every swapped site is proved, the whole model is within
its limit, and the profiler sees our kernels. Times are recorded, whatever they
are. Weights are random: no checkpoint is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ahead import compile_ahead
from model_rows import ROWS, STEPS, Row
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap.timing.clock import clock_of
from normswap.timing.model import compare

WAYS = ("eager", "default", "all", "no norms", "compile", "compile of ours")
EVERY = (*ROWS, *STEPS)
COMPILED_AT_ONCE = 5
Function = Callable[[], object]


def unaccounted(model: nn.Module, plan: normswap.Plan) -> list[str]:
    """Norms that the plan neither swaps nor refuses; BatchNorms without a Linear before them are not its business."""
    known = {s.site.name for s in plan.swaps} | {r.site.name for r in plan.refused}
    known |= {alias for s in plan.swaps for alias in s.site.aliases}
    return [
        name
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__ and "BatchNorm" not in type(module).__name__ and name not in known
        if not list(module.children())  # a head that holds a norm is not one
    ]


def kernel_calls(run: Function) -> int:
    """Calls of our ops in one run. No hook counts calls of sites: a norm with one is not joined with its neighbours."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.key.startswith("normswap::"))


def optimized(row: Row, model: nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> tuple[nn.Module, float]:
    """The result of ``normswap.optimize`` as the row's user calls it, and the seconds that took."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    with warnings.catch_warnings(), row.mode():
        warnings.simplefilter("ignore", UserWarning)
        found = normswap.optimize(model, tuple(inputs), **options)
    torch.cuda.synchronize()
    return found, time.perf_counter() - started


def step(row: Row, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Function:
    """One forward, or a whole step of training: forward, loss, backward, the optimizer's step, gradients dropped."""

    def forward() -> torch.Tensor:
        with row.mode():
            return model(*inputs)

    if not row.training:
        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def once() -> None:
        forward().float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def without_norms(model: nn.Module) -> nn.Module:
    """A copy whose norms hand on what they are given, to their activation where they have one: what eager mode would
    take if norms cost nothing. What is fused with sums, activations and convolutions can be faster."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        learns = any(True for child in module.children() for _ in child.parameters())  # a head that holds a norm
        if "Norm" in type(module).__name__ and not learns:
            vars(module)["forward"] = getattr(module, "act", nn.Identity())
    return copied


def compiled(row: Row, model: nn.Module, inputs: Sequence[torch.Tensor], **options: Any) -> dict[str, Any]:
    """The model compiled, as it is and optimized for that."""
    torch._dynamo.reset()
    ours, _ = optimized(row, model, inputs, for_compile=True, **options)
    return {"compile": torch.compile(model), "compile of ours": torch.compile(ours)}


def compile_once(name: str) -> None:
    """Compile a row's model both ways, which leaves the code in Inductor's cache on the disk."""
    row = next(row for row in EVERY if row.name == name)
    torch.manual_seed(0)
    model, inputs = row.made()
    for way in compiled(row, model, inputs, validate="off").values():
        step(row, way, inputs)()
    torch.cuda.synchronize()


def check(row: Row, compiling: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = row.made()
    plan = normswap.plan(model)
    default, seconds = optimized(row, model, inputs)
    everything, _ = optimized(row, model, inputs, min_speedup=None)
    ways = {"eager": model, "default": default, "all": everything, "no norms": without_norms(model)}
    if compiling:
        ways |= compiled(row, model, inputs)
    steps = {name: step(row, way, inputs) for name, way in ways.items()}
    ran = kernel_calls(steps["all"])
    for once in steps.values():
        once()
    device = next(model.parameters()).device
    times = compare(clock_of(device), [(contextlib.nullcontext, once) for once in steps.values()])
    report, chosen = normswap.report(everything), normswap.report(default)
    rows = [found for found in report.rows if found["swapped"] or found["status"] == "failed"]
    problems = [f"not accounted for: {n}" for n in unaccounted(model, plan)]
    problems += [
        f"{found['name']}: {found['status']} {found['detail']}" for found in rows if found["status"] != "proved"
    ]
    problems += [] if ran else ["none of our kernels ran"]
    if not (report.model and report.model["passed"]):
        problems += [f"the whole model: {report.model}"]
    return {
        "model": row.name,
        "training": row.training,
        "dtype": row.told,
        "swapped": len(report.swapped),
        "kept": len(chosen.swapped),
        "refused": sorted({found["reason"] for found in report.rows if found["status"] == "refused"}),
        "kernel_calls": ran,
        "worst_error_share": max((found["error_share"] for found in rows), default=0.0),
        "pytorch_error_share": max((found["eager_error_share"] for found in rows), default=0.0),
        "model_error": report.model["max_error"] if report.model else None,
        "model_limit": report.model["limit"] if report.model else None,
        "optimize_s": seconds,
        "times": chosen.times,
        "ms": {name: us / 1000 for name, us in zip(steps, times.us, strict=True)},
        "problems": problems,
    }


def check_all(names: Sequence[str] = (), compiling: bool = True, ahead: bool = True) -> Iterator[dict[str, Any]]:
    """The rows of these names, or all, as they are done; ``ahead``: what is to be compiled is compiled first, several
    at once. Raises SystemExit for a name that is none."""
    if unknown := set(names) - {row.name for row in EVERY}:
        raise SystemExit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in EVERY)}")
    rows = [row for row in EVERY if not names or row.name in names]
    if compiling and ahead:
        compile_ahead("check_models.py", [[row.name] for row in rows], COMPILED_AT_ONCE)
    for row in rows:
        yield check(row, compiling)
        torch.cuda.empty_cache()


def table(found: list[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        ms = [f"{row['ms'][way]:.2f}" if way in row["ms"] else "-" for way in WAYS]
        waits = row["times"]["bound"] if row["times"] else "-"
        lines.append([row["model"], f"{row['kept']}/{row['swapped']}", waits, *ms, f"{row['optimize_s']:.1f}"])
    headers = ("model", "kept", "waits for", *WAYS, "optimize s")
    problems = [f"{row['model']}: {p}" for row in found for p in row["problems"]]
    refused = [f"{row['model']}: refused: {r}" for row in found for r in row["refused"]]
    return "\n".join([tabulate(lines, headers, disable_numparse=True), *sorted(set(refused)), *problems])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--compile-only", action="store_true", help="fill Inductor's cache, no more")
    asked = parser.parse_args()
    if asked.compile_only:
        for name in asked.names:
            compile_once(name)
    else:
        for row in check_all(asked.names, not asked.eager):
            print(table([row]), flush=True)
