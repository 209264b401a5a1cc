"""What a swapped call costs the host beside PyTorch's own: on a GPU, as the benchmark tells it, and in Python alone,
without one, where our native ops do nothing and PyTorch's run on a few elements. This prints the latter, microseconds
of this thread's processor time, the least of many rounds.

    python scripts/host_cost.py [CALLS]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from networks import group_norm_relu
from tabulate import tabulate
from torch import Tensor, nn
from workloads import L1Norm, LinearScaleBatchNorm, RMSNormByHand, randomised

import normswap
from normswap.ops import dispatch


class SumAndNorm(nn.Module):
    """A residual before a LayerNorm, as in a pre-norm block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, which is given out, and its norm."""
        x = x + x
        return x, self.norm(x)


class BetweenSums(SumAndNorm):
    """The same in a block that keeps its sum to itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The sum and its norm, added."""
        x = x + x
        return x + self.norm(x)


@normswap.register_norm("rms_norm", weight="gain", eps=1e-6)
class Registered(nn.Module):
    """A norm that normswap knows because it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """RMSNorm."""
        return nn.functional.rms_norm(x, self.gain.shape, self.gain, 1e-6)


HOST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nn.LayerNorm": (lambda: nn.LayerNorm(256), (8, 256)),
    "nn.RMSNorm": (lambda: nn.RMSNorm(256, eps=1e-6), (8, 256)),
    "nn.GroupNorm": (lambda: nn.GroupNorm(8, 64), (2, 64, 8, 8)),
    "RMSNorm by hand": (lambda: RMSNormByHand(256), (8, 256)),
    "RMSNorm by register_norm": (lambda: Registered(256), (8, 256)),
    "sum, LayerNorm": (lambda: SumAndNorm(256), (8, 256)),
    "LayerNorm between sums": (lambda: BetweenSums(256), (8, 256)),
    "GroupNorm, ReLU": (lambda: group_norm_relu(8, 64), (2, 64, 8, 8)),
    "BatchNorm, ReLU, training": (lambda: nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()), (2, 64, 8, 8)),
    "L1 norm": (L1Norm, (8, 256)),
    "Linear, scale, BatchNorm": (lambda: LinearScaleBatchNorm(64, 64), (256, 64)),
}
"""What is timed, and the shape of a small input."""
GRADIENTS = ("no", "forward", "forward and backward")
"""What of a call records or computes gradients."""


def on_the_gpu(calls: int = 500, rounds: int = 15) -> list[dict[str, Any]]:
    """Microseconds of the host for a call of each of HOST, in eval unless its name says so, medians over rounds of
    calls that the device finishes sooner: under no_grad, without it, where the parameters require gradients, and with
    the backward too."""
    rows = []
    for name, (make, shape) in HOST.items():
        model = randomised(make()).cuda().train(name.endswith("training"))
        x = torch.randn(shape, device="cuda")
        modules = {"eager": model, "normswap": normswap.optimize(model, validate="off", on_empty="raise")}
        for gradients in GRADIENTS if list(model.parameters()) else GRADIENTS[:1]:
            functions = {key: _call(module, x, gradients) for key, module in modules.items()}
            times: dict[str, list[float]] = {key: [] for key in functions}
            with torch.set_grad_enabled(gradients != "no"):
                for _ in range(rounds):
                    for key, (function, count) in functions.items():
                        times[key].append(host_us(function, calls // count) / count)
            medians = {f"{key}_us": statistics.median(found) for key, found in times.items()}
            rows.append({"module": name, "gradients": gradients, **medians})
    return rows


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as a person reads it, below HEADERS."""
    return row["module"], row["gradients"], f"{row['eager_us']:.1f}", f"{row['normswap_us']:.1f}"


HEADERS = ("module", "gradients", "eager", "normswap")
CHAIN = 8


def _call(module: nn.Module, x: Tensor, gradients: str) -> tuple[Callable[[], object], int]:
    """What to time, and how many calls that makes. Backwards are those of a chain, as in a model: the engine's thread,
    which has to be woken, runs several in a row."""
    if gradients != "forward and backward":
        return lambda: module(x), 1
    chain, leaf, cotangent = (
        [copy.deepcopy(module) for _ in range(CHAIN)],
        x.clone().requires_grad_(),
        torch.ones_like(x),
    )
    wanted = [leaf, *(p for one in chain for p in one.parameters() if p.requires_grad)]

    def forward_and_backward() -> object:
        out = leaf
        for one in chain:
            found = one(out)
            out = found[-1] if isinstance(found, tuple) else found
        return torch.autograd.grad(out, wanted, cotangent)

    return forward_and_backward, CHAIN


def host_us(function: Callable[[], object], calls: int) -> float:
    """Microseconds of the host for a call that queues work on the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


# --- Python alone -----------------------------------------------------------------------------------------------------

ROUNDS = 40
NORMS = (
    *("nn.LayerNorm", "nn.RMSNorm", "nn.GroupNorm", "RMSNorm by hand", "RMSNorm by register_norm"),
    *("sum, LayerNorm", "LayerNorm between sums", "GroupNorm, ReLU"),
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
OPS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")


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
    ops = {name: (lambda *args: two) if name in ("layer_norm", "rms_norm") else (lambda *args: one) for name in OPS}
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
