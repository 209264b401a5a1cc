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
from typing import Any
from unittest import mock

import torch
from benchmark import HOST
from tabulate import tabulate
from torch import Tensor, nn

import normswap
from normswap.ops import dispatch

ROUNDS = 40
NORMS = (
    *("nn.LayerNorm", "nn.RMSNorm", "nn.GroupNorm", "RMSNorm by hand", "RMSNorm by register_norm"),
    *("sum, LayerNorm", "GroupNorm, ReLU"),
)
FEATURES = 16


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x) * self.scale))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU())


ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (HOST[name][0], (2, *HOST[name][1][1:])) for name in NORMS},
    "Linear, BatchNorm, ReLU": (linear, (2, FEATURES)),
    "Linear, scale, BatchNorm, ReLU": (Scaled, (2, FEATURES)),
    "Linear, BatchNorm, ReLU, folded": (linear, (2 * FEATURES, FEATURES)),
}
"""What is timed, and the shape of a small input: where there are more rows than features, a Linear is folded."""
OPS = ("layer_norm", "rms_norm", "group_norm", "layer_norm_with_options", "rms_norm_with_options", "batch_norm")


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
    stack.enter_context(mock.patch.dict(dispatch._native, {"fold_linear": _zeros}))
    stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))


def _zeros(*args: Any) -> None:
    """In the place of what is folded: PyTorch multiplies by it, which with what lies in memory may take longer."""
    for out in args[-2:]:
        out.zero_()


def made(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model of a row, it swapped, and a small input."""
    make, shape = ROWS[name]
    model = make().eval()
    return model, normswap.apply(model, normswap.plan(model)), torch.randn(shape)


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
