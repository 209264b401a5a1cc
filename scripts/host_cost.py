"""What a swapped call costs the host in Python, beside PyTorch's own call, without a GPU: our native ops do nothing
here, PyTorch's run on a few elements. Microseconds of this thread's processor time, the least of many rounds.

    python scripts/host_cost.py [CALLS]
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch
from benchmark import HOST
from tabulate import tabulate
from torch import Tensor, nn

import normswap
from normswap.ops import dispatch

ROUNDS = 40
ROWS = (
    *("nn.LayerNorm", "nn.RMSNorm", "nn.GroupNorm", "RMSNorm by hand", "RMSNorm by register_norm"),
    *("sum, LayerNorm", "GroupNorm, ReLU"),
)
OPS = ("layer_norm", "rms_norm", "group_norm", "layer_norm_with_options", "rms_norm_with_options")


def cost_us(function: Callable[[Tensor], object], x: Tensor, calls: int) -> float:
    """The least of rounds of ``calls`` calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(calls):
            function(x)
        times.append((time.thread_time() - start) / calls * 1e6)
    return min(times)


def idle_ops(stack: ExitStack) -> None:
    """Until ``stack`` is left, tensors are taken for a GPU's, and the native ops that do all of a call do nothing."""
    one, two = torch.empty(1), (torch.empty(1), torch.empty(1))
    ops = {name: (lambda *args: two) if "options" in name else (lambda *args: one) for name in OPS}
    stack.enter_context(mock.patch.dict(dispatch._direct, ops))
    stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))


def made(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model of a row, it swapped, and a small input."""
    make, (_, *shape) = HOST[name]
    model = make().eval()
    return model, normswap.apply(model, normswap.plan(model)), torch.randn(2, *shape)


def main(calls: int) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in ROWS:
        model, swapped, x = made(name)
        with torch.no_grad(), ExitStack() as stack:
            eager = cost_us(model, x, calls)
            idle_ops(stack)
            rows.append((name, f"{eager:.1f}", f"{cost_us(swapped, x, calls):.1f}"))
    print(tabulate(rows, ("no_grad, us a call", "PyTorch's, all of it", "ours, Python alone"), disable_numparse=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
