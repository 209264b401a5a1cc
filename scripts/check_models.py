"""Optimize whole models of timm and transformers on the GPU and check every promise that shows from outside.

Exit 0 only if every norm is swapped or refused with a reason, every swapped site is proved, the whole model is within
its limit, and the profiler counts our kernels as often as swapped sites were called. Times are recorded, whatever they
are. Weights are random: no checkpoint is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from device_time import interleaved
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from workloads import randomised

import normswap
from normswap import modules


def image_model(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        import timm

        return timm.create_model(name), (torch.randn(8, 3, 224, 224),), {}

    return make


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 30000, (8, 128))
    return BertModel(BertConfig()), (), {"input_ids": ids, "return_dict": False}


MODELS = {
    "resnet50_gn": image_model("resnet50_gn"),
    "vit_base_patch16_224": image_model("vit_base_patch16_224"),
    "convnext_base": image_model("convnext_base"),
    "bert": bert,
}


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


def kernel_calls(model: nn.Module, run: Callable[[], object]) -> tuple[int, int]:
    """(calls of swapped sites, calls of our ops) in one run."""
    calls = 0

    def count(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1

    sites = [m for m in model.modules() if modules.site_match(m) is not None]
    handles = [site.register_forward_hook(count) for site in sites]
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    return calls, sum(event.count for event in profiled.key_averages() if event.key.startswith("normswap::"))


def check(name: str, dtype: torch.dtype) -> dict[str, Any]:
    model, args, kwargs = MODELS[name]()
    model = randomised(model).cuda().to(dtype).eval()
    cast = lambda v: v.cuda().to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v  # noqa: E731
    args = tuple(cast(a) for a in args)
    kwargs = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    plan = normswap.plan(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        swapped = normswap.optimize(model, args, kwargs, min_speedup=None)
    report = normswap.report(swapped)
    with torch.no_grad():
        called, ran = kernel_calls(swapped, lambda: swapped(*args, **kwargs))
        runs = {"eager": lambda: model(*args, **kwargs), "normswap": lambda: swapped(*args, **kwargs)}
        times = interleaved(runs, ahead=False)  # as a person would wait for it
    rows = [row for row in report.rows if row["status"] != "refused"]
    problems = [f"not accounted for: {n}" for n in unaccounted(model, plan)]
    problems += [f"{row['name']}: {row['status']} {row['detail']}" for row in rows if row["status"] != "proved"]
    problems += [] if called == ran and called else [f"{called} calls of swapped sites, {ran} of our kernels"]
    if not (report.model and report.model["passed"]):
        problems += [str(w.message) for w in caught][:1] or ["the whole model is beyond its limit"]
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "swapped": len(report.swapped),
        "refused": sorted({row["reason"] for row in report.rows if row["status"] == "refused"}),
        "kernel_calls": ran,
        "worst_error_share": max((row["error_share"] for row in rows), default=0.0),
        "pytorch_error_share": max((row["eager_error_share"] for row in rows), default=0.0),
        "model_error": report.model["max_error"] if report.model else None,
        "model_limit": report.model["limit"] if report.model else None,
        "eager_ms": times["eager"],
        "normswap_ms": times["normswap"],
        "problems": problems,
    }


def check_all() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for name in MODELS:
        for dtype in (torch.float32, torch.float16):
            found.append(check(name, dtype))
            torch.cuda.empty_cache()
    return found


def table(found: list[dict[str, Any]]) -> str:
    keys = (
        "model",
        "dtype",
        "swapped",
        "kernel_calls",
        "worst_error_share",
        "pytorch_error_share",
        "eager_ms",
        "normswap_ms",
    )
    lines = [[f"{row[k]:.2f}" if isinstance(row[k], float) else row[k] for k in keys] for row in found]
    problems = [f"{row['model']} {row['dtype']}: {p}" for row in found for p in row["problems"]]
    refused = [f"{row['model']}: refused: {r}" for row in found for r in row["refused"]]
    return "\n".join([tabulate(lines, keys, disable_numparse=True), *sorted(set(refused)), *problems])
