"""Norms with what stands before and behind them, L2 norms and LayerNorm over channels: device time beside PyTorch's own
operations and a copy of as many bytes, and the host's time of a call.

    python scripts/time_options.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from device_time import interleaved
from tabulate import tabulate
from torch import Tensor

from normswap import ops
from normswap.activation import Activation

ROWS = (
    *((torch.bfloat16, 16_384, 4096), (torch.bfloat16, 4096, 8192), (torch.float16, 50_432, 768)),
    *((torch.float16, 16_384, 1001), (torch.float32, 16_384, 1024), (torch.float32, 8192, 4096)),
    *((torch.bfloat16, 262_144, 128), (torch.bfloat16, 2048, 32_768), (torch.float32, 2048, 32_768)),
)
IMAGES = ((torch.float16, (64, 128, 56, 56)), (torch.float16, (64, 256, 28, 28)), (torch.float16, (64, 512, 14, 14)))
SAMPLES = 64


class Timed(NamedTuple):
    name: str
    ours: Callable[[], object]
    pytorch: Callable[[], object]
    moved: int  # bytes read and written at least


def of_rows(dtype: torch.dtype, rows: int, cols: int) -> Iterator[Timed]:
    x, r = (torch.randn(rows, cols, device="cuda", dtype=dtype) for _ in range(2))
    w, b = (torch.randn(cols, device="cuda", dtype=dtype) for _ in range(2))
    what, size, shape = f"{str(dtype)[6:]} {rows} x {cols}", x.nbytes, (cols,)

    def behind(norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        total = x + r
        return norm(total), total

    yield Timed(
        f"x + r, layer_norm {what}",
        lambda: ops.layer_norm(x, shape, w, b, residual=r),
        lambda: behind(lambda s: F.layer_norm(s, shape, w, b)),
        4 * size,
    )
    yield Timed(
        f"x + r, rms_norm {what}",
        lambda: ops.rms_norm(x, shape, w, 1e-6, residual=r),
        lambda: behind(lambda s: F.rms_norm(s, shape, w, 1e-6)),
        4 * size,
    )
    for name in ("silu", "gelu"):
        activation = Activation(name)
        yield Timed(
            f"layer_norm, {name} {what}",
            lambda activation=activation: ops.layer_norm(x, shape, w, b, activation=activation),
            lambda activation=activation: activation(F.layer_norm(x, shape, w, b)),
            2 * size,
        )
    if rows % SAMPLES == 0:
        tokens = x.view(SAMPLES, -1, cols)
        shift, scale = torch.randn(SAMPLES, 1, 2 * cols, device="cuda", dtype=dtype).chunk(2, -1)
        yield Timed(
            f"adaptive layer_norm {what}",
            lambda: ops.layer_norm(tokens, shape, scale=scale, shift=shift),
            lambda: F.layer_norm(tokens, shape) * (1 + scale) + shift,
            2 * size,
        )
    yield Timed(f"l2_norm {what}", lambda: ops.l2_norm(x, -1, 1e-12), lambda: F.normalize(x, dim=-1), 2 * size)


def of_images(dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Timed]:
    image, channels = torch.randn(shape, device="cuda", dtype=dtype), shape[1:2]
    w, b = (torch.randn(channels, device="cuda", dtype=dtype) for _ in range(2))
    for x, layout in ((image, "NCHW"), (image.to(memory_format=torch.channels_last), "NHWC")):
        what = f"{str(dtype)[6:]} {' x '.join(map(str, shape))} {layout}"
        yield Timed(
            f"layer_norm_dim {what}",
            lambda x=x: ops.layer_norm_dim(x, 1, w, b),
            lambda x=x: F.layer_norm(x.permute(0, 2, 3, 1), channels, w, b).permute(0, 3, 1, 2),
            2 * x.nbytes,
        )
        yield Timed(
            f"l2_norm {what}", lambda x=x: ops.l2_norm(x, 1, 1e-12), lambda x=x: F.normalize(x, dim=1), 2 * x.nbytes
        )


def of_tensors() -> Iterator[Timed]:
    for shape in ((4096, 4096), (256, 1024)):
        x = torch.randn(shape, device="cuda")
        what = " x ".join(map(str, shape))
        yield Timed(
            f"frobenius_norm float32 {what}", lambda x=x: ops.frobenius_norm(x), lambda x=x: x / x.norm(), 2 * x.nbytes
        )


def device_row(timed: Timed) -> list[object]:
    source = torch.empty(timed.moved // 8, device="cuda")
    target = torch.empty_like(source)
    functions = {"ours": timed.ours, "pytorch": timed.pytorch, "copy": lambda: target.copy_(source)}
    ms = interleaved(functions)
    ours, pytorch, copy = (1000 * ms[name] for name in functions)
    return [timed.name, *(round(us, 1) for us in (ours, pytorch, copy)), f"{copy / ours:.0%}", f"{pytorch / ours:.2f}"]


def host_us(function: Callable[[], object], calls: int = 300) -> float:
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / calls * 1e6


def main() -> None:
    with torch.no_grad():
        for part in (*(of_rows(*size) for size in ROWS), *(of_images(*size) for size in IMAGES), of_tensors()):
            rows = [device_row(timed) for timed in part]
            print(tabulate(rows, ("device time", "ours us", "PyTorch us", "copy us", "of a copy", "times faster")))
        host = [*of_rows(torch.float32, 64, 64), *of_images(torch.float32, (2, 8, 4, 4)), *of_tensors()]
        table = [[timed.name, round(host_us(timed.ours), 1), round(host_us(timed.pytorch), 1)] for timed in host]
        print(tabulate(table, ("host time of a call", "ours us", "PyTorch us")))


if __name__ == "__main__":
    main()
