"""What torchvision's networks take in eval on a GPU, channels_last: the wall's clock of a forward by PyTorch, with each
convolution folded whose way is fused or a matmul, with that in a CUDA graph, and by default.

    python scripts/convolution_times.py [NAME ...] [--batch N ...] [--dtype float16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import normswap
from normswap import walk
from normswap.plan import Match, Plan, Swap
from normswap.regions.foldings import foldings_of, without_convolution
from normswap.regions.spec import Region

NAMES = ("resnet50", "mobilenet_v3_large", "efficientnet_b0", "regnet_y_3_2gf", "densenet121")


def wall_ms(run: Callable[[], object], runs: int = 30, rounds: int = 5) -> float:
    for _ in range(5):
        run()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) / runs * 1e3)
    return sorted(found)[rounds // 2]


def folded_plan(model: nn.Module) -> Plan:
    """Every convolution without groups that cuDNN fuses, and every other one that is a matrix product."""
    swaps = []
    for swap in walk.plan(model, undecided=True).swaps:
        owner, kept = model.get_submodule(swap.site.name), []
        for region in map(Region.from_json, swap.match.attributes.get("regions", ())):
            chosen = _chosen(region, owner)
            kept += [] if chosen is None else [chosen]
        if kept:
            swaps.append(Swap(swap.site, Match(swap.match.kind, {**swap.match.attributes, "regions": kept})))
    return Plan(tuple(swaps))


def _chosen(region: Region, owner: Any) -> dict[str, Any] | None:
    ways = foldings_of(region, owner) if region.convolution else ()
    if "fused" in ways and owner._modules[region.convolution].groups == 1:
        return {**region.to_json(), "folding": "fused"}
    if "matmul" in ways:
        return {**region.to_json(), "folding": "matmul"}
    rest = without_convolution(region)
    return None if rest is None else rest.to_json()


@torch.no_grad()
def told(name: str, batch: int, dtype: torch.dtype) -> str:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)().eval().cuda().to(dtype).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    folded = normswap.apply(model, folded_plan(model))
    folded(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        folded(x)
    chosen = normswap.optimize(model, x)
    ways = {"eager": lambda: model(x), "folded": lambda: folded(x), "graph": graph.replay, "default": lambda: chosen(x)}
    return f"{name}, batch {batch}, ms: " + ", ".join(f"{way} {wall_ms(run):.2f}" for way, run in ways.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--dtype", default="float16")
    given = parser.parse_args()
    for name in given.names:
        for batch in given.batch:
            print(told(name, batch, getattr(torch, given.dtype)), flush=True)


if __name__ == "__main__":
    main()
