"""The criterion of the proof as an assertion, for the tests of single ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accuracy import gpu_of_plans as gpu_of_plans
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from normswap.criterion import error_share


def assert_within(ours: Tensor, reference: Tensor, magnitude: Tensor, what: str = "") -> None:
    """Fail when an element is further from the float64 ``reference`` than its limit allows (c = 4)."""
    share = error_share(ours, reference, magnitude, 4.0)
    assert share <= 1.0, f"{what}: error is {share:.3g} times its limit"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True when two tensors hold the same values (NaN equals NaN)."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def kernels(call: Callable[[], object]) -> list[str]:
    """What ran on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return [event.key for event in found.key_averages()]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") + mean).to(dtype)
