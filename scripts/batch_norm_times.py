"""BatchNorm2d in training on resnet50's shapes: forward, and forward with backward, alone, with a ReLU, with a residual
and a ReLU. Milliseconds of the device for PyTorch's, ours and, with --compile, torch.compile's, called in turn, beside
the passes over the tensor at the rate of a copy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import device_time
import torch
from device_time import copy_rate, interleaved
from networks import RESNET50
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import batch_norm

from normswap import native, ops
from normswap.activation import NONE, Activation

LAYOUTS = {  # name: dtype, memory format
    "f16": (torch.float16, torch.channels_last),
    "bf16": (torch.bfloat16, torch.channels_last),
    "f32": (torch.float32, torch.contiguous_format),
}
FORMS = {"": 0, "relu": 0, "add relu": 1}
"""What stands behind the norm, and how many residuals that takes."""
LARGE_BYTES = 16e6


def passes(form: str, backward: bool, itemsize: int) -> float:
    """Over the tensor: x twice and y in the forward; x and dy twice and dx in the backward; a residual, its gradient,
    and the signs written and read."""
    extra = 1 / (8 * itemsize)
    forward = 3 + (1 + extra if form == "add relu" else 0)
    return forward + (5 + (1 + extra if form == "add relu" else 0) if backward else 0)


def original(form: str, x: Tensor, values: list[Tensor], residual: Tensor) -> Tensor:
    mean, var, weight, bias = values
    out = batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)
    out = out + residual if form == "add relu" else out
    return torch.relu(out) if form else out


def ours(form: str, x: Tensor, values: list[Tensor], residual: Tensor) -> Tensor:
    mean, var, weight, bias = values
    activation = Activation("relu") if form else NONE
    behind = residual if form == "add relu" else None
    return ops.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5, activation, residual=behind)


def step(function: Callable[..., Tensor], given: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(function(), given, dy)


def rows(layout: str, shapes: list[tuple[int, ...]], compiles: bool, rate: float) -> Iterator[list[object]]:
    dtype, memory_format = LAYOUTS[layout]
    for shape in shapes:
        x, dy, residual = (
            torch.randn(shape, device="cuda").to(dtype).to(memory_format=memory_format) for _ in range(3)
        )
        values = [torch.rand(shape[1], device="cuda") + 0.5 for _ in range(4)]
        for form in FORMS:
            for backward in (False, True):
                given = [x, values[2], values[3], *([residual] if form == "add relu" else [])]
                for t in given:
                    t.requires_grad_(backward)
                functions = {"eager": original, "ours": ours}
                if compiles:
                    functions["compile"] = torch.compile(original, dynamic=False)
                called = {name: partial(f, form, x, values, residual) for name, f in functions.items()}
                if backward:
                    called = {name: partial(step, f, given, dy) for name, f in called.items()}
                times = interleaved(called)
                floor = passes(form, backward, dtype.itemsize) * x.numel() * dtype.itemsize / rate
                best = min(value for name, value in times.items() if name != "ours")
                met = times["ours"] <= best and (
                    x.numel() * dtype.itemsize < LARGE_BYTES or times["ours"] <= 1.35 * floor
                )
                what = f"{layout} {'x'.join(map(str, shape))} bn {form} {'fwd+bwd' if backward else 'fwd'}"
                yield [what, floor, *times.values(), times["ours"] / floor, "" if met else "missed"]
                for t in given:
                    t.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, nargs="*", help="only the shapes of so many channels")
    parser.add_argument("--large", action="store_true", help="only (64, 64, 512, 512) in float32")
    parser.add_argument("--budget-ms", type=float, default=device_time.BUDGET_MS, help="for a row")
    given = parser.parse_args()
    device_time.BUDGET_MS = given.budget_ms
    native.load(build=True)
    rate = copy_rate()
    shapes = (
        [(64, 64, 512, 512)]
        if given.large
        else [(given.batch, c, size, size) for c, size in RESNET50 if not given.channels or c in given.channels]
    )
    torch._dynamo.config.recompile_limit = 1000
    names = ("", "passes", "eager", "ours", *(["compile"] if given.compile else []), "ratio", "")
    for layout in ["f32"] if given.large else given.layouts:
        found = [*rows(layout, shapes, given.compile, rate)]
        print(tabulate(found, names, floatfmt=".4f"), flush=True)


if __name__ == "__main__":
    main()
