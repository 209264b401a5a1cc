"""Forward and backward of the row norms beside eager, on the GPU: the device's time against five passes over the input
at the rate of a copy, and what the host pays for a small one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from device_time import interleaved
from tabulate import tabulate
from torch import Tensor, nn

from normswap import modules

SIZES: tuple[tuple[str, tuple[int, ...], int, torch.dtype, bool], ...] = (
    ("LayerNorm", (16384, 4096), 1, torch.bfloat16, False),
    ("LayerNorm", (50432, 768), 1, torch.float16, False),
    ("LayerNorm", (50432, 768), 1, torch.float16, True),
    ("LayerNorm", (1576, 768), 1, torch.float16, False),
    ("LayerNorm", (16384, 4096), 1, torch.float32, False),
    ("RMSNorm", (16384, 4096), 1, torch.bfloat16, False),
    ("RMSNorm", (8192, 8192), 1, torch.bfloat16, False),
    ("RMSNorm", (524288, 128), 1, torch.bfloat16, False),
    ("LayerNorm", (16, 64, 256, 256), 3, torch.float32, False),
    ("L1Norm", (8192, 65535), 1, torch.float32, False),
)
"""Kind, input, normalised dims, dtype, and whether under autocast with weights in float32."""


class DividedByMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(-1, keepdim=True)


def pair(kind: str, shape: Sequence[int], dims: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The module of PyTorch, and ours with the same weights."""
    if kind == "L1Norm":
        return DividedByMean(), modules.L1Norm()
    module = getattr(nn, kind)(list(shape[-dims:])).to("cuda", dtype)
    return module, getattr(modules, kind).from_torch(module)


def step(module: nn.Module, x: Tensor, autocast: bool) -> Callable[[], object]:
    """Forward and backward, with gradients of the input and of the parameters."""
    with torch.autocast("cuda", torch.float16, enabled=autocast):
        dy = torch.randn_like(module(x))

    def once() -> object:
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            out = module(x)
        return torch.autograd.grad(out, (x, *module.parameters()), dy)

    return once


def copy_rate() -> float:
    """Bytes read and written a millisecond."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / interleaved({"copy": lambda: target.copy_(source)})["copy"]


def row(kind: str, shape: tuple[int, ...], dims: int, dtype: torch.dtype, autocast: bool, rate: float) -> list[object]:
    eager, ours = pair(kind, shape, dims, torch.float32 if autocast else dtype)
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    found = interleaved({"eager": step(eager, x, autocast), "ours": step(ours, x, autocast)})
    wide = x.nbytes * (2 if autocast else 1)  # output and its gradient
    floor = (3 * x.nbytes + 2 * wide) / rate
    what = f"{str(dtype)[6:]}{', autocast' if autocast else ''}"
    times = [floor, found["eager"], found["ours"], found["ours"] / floor]
    return [kind, "x".join(map(str, shape)), what, *(f"{value:.3f}" for value in times)]


def host_times() -> list[list[object]]:
    """Microseconds a call of 8 x 64 float32 in turn, with gradients recorded and with them taken."""
    rows: list[list[object]] = []
    for kind in ("LayerNorm", "RMSNorm"):
        x = torch.randn(8, 64, device="cuda", requires_grad=True)
        both_kinds, dy = pair(kind, x.shape, 1, torch.float32), torch.randn(8, 64, device="cuda")

        def both(module: nn.Module, x: Tensor = x, dy: Tensor = dy) -> object:
            return module(x).backward(dy)

        for name, function in (("forward", lambda module, x=x: module(x)), ("forward+backward", both)):
            eager, ours = alternately([lambda m=m, f=function: f(m) for m in both_kinds])
            rows.append([kind, name, f"{eager:.1f}", f"{ours:.1f}", f"{ours / eager:.2f}"])
    return rows


def alternately(functions: Sequence[Callable[[], object]], calls: int = 200, rounds: int = 15) -> list[float]:
    """Median microseconds of the host for each function."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, mine in zip(functions, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            mine.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(mine[1:]) for mine in times]


def main() -> None:
    rate = copy_rate()
    print(f"copy {rate / 1e9:.2f} TB/s; forward and backward, ms")
    head = ["module", "input", "dtype", "5 passes", "eager", "ours", "of 5 passes"]
    print(tabulate([row(*size, rate) for size in SIZES], headers=head))
    print(tabulate(host_times(), headers=["host", "us a call", "eager", "ours", "of eager"]))


if __name__ == "__main__":
    main()
