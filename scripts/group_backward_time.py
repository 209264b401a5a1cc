"""Forward and backward of group norms on the GPU: PyTorch's and ours, in milliseconds and as multiples of five passes
over the tensor at the rate of a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from device_time import copy_rate, interleaved
from networks import RESNET50
from tabulate import tabulate
from torch import Tensor
from torch.nn.functional import group_norm

from normswap import native, ops
from normswap.activation import NONE, Activation

SILU = Activation("silu")
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
ROWS = (  # shape, groups, dtype, activation, memory format
    *(
        ((64, channels, size, size), 32, torch.float16, NONE, layout)
        for channels, size in RESNET50
        for layout in (CONTIGUOUS, CHANNELS_LAST)
    ),
    ((8, 128, 256, 256), 32, torch.float16, SILU, CONTIGUOUS),
    ((8, 128, 256, 256), 32, torch.float16, SILU, CHANNELS_LAST),
    ((16, 320, 64, 64), 32, torch.float16, SILU, CONTIGUOUS),
    ((16, 320, 64, 64), 32, torch.float16, SILU, CHANNELS_LAST),
    ((28, 64, 512, 512), 8, torch.float32, NONE, CONTIGUOUS),
)
PASSES = 5


def step(norm: Callable[[Tensor, Tensor, Tensor], Tensor], given: list[Tensor], dy: Tensor) -> None:
    x, weight, bias = given
    torch.autograd.grad(norm(x, weight, bias), given, dy)


def row(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    activation: Activation,
    layout: torch.memory_format,
    rate: float,
) -> list[object]:
    x, dy = (torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout) for _ in range(2))
    weight, bias = (torch.randn(shape[1], device="cuda", dtype=dtype) for _ in range(2))
    given = [t.requires_grad_() for t in (x, weight, bias)]
    norms = {
        "eager": lambda x, w, b: activation(group_norm(x, groups, w, b)),
        "ours": lambda x, w, b: ops.group_norm(x, groups, w, b, activation=activation),
    }
    times = interleaved({name: partial(step, norm, given, dy) for name, norm in norms.items()})
    floor = PASSES * x.numel() * x.element_size() / rate
    what = f"GN({groups}) {'x'.join(map(str, shape))} {str(dtype)[6:]} {activation.name} {str(layout)[6:]}"
    return [what, floor, times["eager"], times["ours"], times["ours"] / floor]


def main() -> None:
    native.load(build=True)
    rate = copy_rate()
    print(tabulate([row(*each, rate) for each in ROWS], ("", "5 passes", "eager", "ours", "ratio"), floatfmt=".3f"))


if __name__ == "__main__":
    main()
