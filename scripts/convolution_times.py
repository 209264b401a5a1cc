"""What networks of torchvision and timm take in eval on a GPU, channels_last, ms of a forward by the wall's clock, in
turns: by PyTorch, with each convolution fused that can be, with ours where it is one ("scaled"), by default, by CUDA
graphs of the two before that, and with --compile by torch.compile; in brackets what a forward costs the device and the
host. First, what one block costs.

    python scripts/convolution_times.py [NAME ...] [--batch N ...] [--dtype float16] [--compile]
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import normswap
from normswap import finding
from normswap.activation import CODES
from normswap.plans import Match, Plan, Swap
from normswap.regions.foldings import foldings_of, without_convolution
from normswap.regions.spec import Region
from normswap.timing.clock import clock_of, costs
from normswap.timing.model import compare, waiting

NAMES = ("resnet50", "densenet121", "regnety_032", "efficientnet_b0", "mobilenetv3_large_100")
CUDA = torch.device("cuda", 0)


ORDER = ("fused",)


def folded_plan(model: nn.Module, order: Sequence[str] = ORDER) -> Plan:
    """Every convolution by the first way of ``order`` that it has; by cuDNN's fused one only without groups."""
    swaps = []
    for swap in finding.plan(model, undecided=True).swaps:
        owner, kept = model.get_submodule(swap.site.name), []
        for region in map(Region.from_json, swap.match.attributes.get("regions", ())):
            chosen = _chosen(region, owner, order)
            kept += [] if chosen is None else [chosen]
        if kept:
            swaps.append(Swap(swap.site, Match(swap.match.kind, {**swap.match.attributes, "regions": kept})))
    return Plan(tuple(swaps))


def _chosen(region: Region, owner: Any, order: Sequence[str]) -> dict[str, Any] | None:
    ways = foldings_of(region, owner) if region.convolution else ()
    for way in order:
        if way in ways and (way != "fused" or owner._modules[region.convolution].groups == 1):
            return {**region.to_json(), "folding": way}
    rest = without_convolution(region)
    return None if rest is None else rest.to_json()


def made(name: str, dtype: torch.dtype) -> nn.Module:
    """The network, of timm but for torchvision's resnet50, with random statistics."""
    import timm
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet50() if name == "resnet50" else timm.create_model(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval().to(CUDA, dtype).to(memory_format=torch.channels_last)


@torch.no_grad()
def told(name: str, batch: int, dtype: torch.dtype, compiled: bool) -> str:
    model = made(name, dtype)
    x = torch.randn(batch, 3, 224, 224, device=CUDA, dtype=dtype).contiguous(memory_format=torch.channels_last)
    folded = normswap.apply(model, folded_plan(model))
    scaled = normswap.apply(model, folded_plan(model, ("scaled", *ORDER)))
    begun = time.perf_counter()
    chosen = normswap.optimize(model, x)
    seconds = time.perf_counter() - begun
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: model(x),
        "folded": lambda: folded(x),
        "scaled": lambda: scaled(x),
        "default": lambda: chosen(x),
        "graph": _graph(folded, x),
        "graph of scaled": _graph(scaled, x),
    }
    if compiled:
        faster = torch.compile(model)
        ways["compile"] = lambda: faster(x)
    machine = clock_of(CUDA)
    found = compare(machine, [(contextlib.nullcontext, run) for run in ways.values()])
    apart = [waiting(machine, run) for run in ways.values()]
    shown = (
        f"{way} {us / 1e3:.2f} ({cost.device_us / 1e3:.2f}, {cost.host_us / 1e3:.2f})"
        for way, us, cost in zip(ways, found.us, apart, strict=True)
    )
    return f"{name}, batch {batch}: {', '.join(shown)}; {_chosen_of(chosen)}; optimize took {seconds:.0f} s"


def _chosen_of(model: nn.Module) -> str:
    """How many regions were kept, by their folding."""
    swaps = normswap.report(model).plan.swaps
    regions = [one for swap in swaps for one in swap.match.attributes.get("regions", ())]
    ways = [one["folding"] or "apart" for one in regions]
    return ", ".join(f"{ways.count(way)} {way}" for way in sorted({*ways})) or "nothing kept"


def _graph(model: nn.Module, x: Tensor) -> Callable[[], None]:
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    return graph.replay


class Block(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


@torch.no_grad()
def block_told(dtype: torch.dtype, kernel: int) -> str:
    """Microseconds of the host for one block, by PyTorch and folded, and for what it consists of."""
    block = Block(64, kernel).eval().to(CUDA, dtype).to(memory_format=torch.channels_last)
    x = torch.randn(2, 64, 8, 8, device=CUDA, dtype=dtype).contiguous(memory_format=torch.channels_last)
    folded = normswap.apply(block, folded_plan(block))
    assert torch.allclose(folded(x), block(x), atol=0.02)
    conv, bn, weight = block.conv, block.bn, block.conv.weight
    shift, alone, pad = torch.zeros(64, device=CUDA, dtype=dtype), (1, 1), kernel // 2
    fold = torch.ops.normswap.fold_convolution_or_none.default._op
    op = torch.ops.normswap.convolution_batch_norm_eval_or_none.default._op
    norm, relu = (bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps), (CODES["relu"], 0.0, 0.0)
    ways: dict[str, Callable[[], Any]] = {
        "eager": lambda: block(x),
        "folded": lambda: folded(x),
        "scaled": lambda: op(x, weight, None, 1, 1, pad, pad, 1, 1, 1, *norm, None, *relu),
        "the fold": lambda: fold(weight, None, *norm),
        "cudnn_convolution_relu": lambda: torch.cudnn_convolution_relu(x, weight, shift, alone, (pad, pad), alone, 1),
        "conv": lambda: conv(x),
        "bn": lambda: bn(x),
        "relu": lambda: block.act(x),
    }
    found = costs(clock_of(CUDA), [*ways.values()])
    return f"a block of a {kernel} x {kernel} convolution, us of the host: " + ", ".join(
        f"{w} {c.host_us:.1f}" for w, c in zip(ways, found, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    for kernel in (3, 1):
        print(block_told(dtype, kernel), flush=True)
    for name in given.names:
        for batch in given.batch:
            print(told(name, batch, dtype, given.compile), flush=True)


if __name__ == "__main__":
    main()
