"""BatchNorm in training, and frozen with gradients, on the GPU against float64 and PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import same_bits
from torch import Tensor

from normswap import ops
from normswap.activation import NONE, Activation

DEVICE = "cuda"
RESNET50 = ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14), (64, 2048, 7, 7))
SHAPES = (
    *((64, 7), (2, 5000), (300, 24), (5, 33, 9), (4, 64, 3000), (2, 3, 3249), (3, 2, 4097), (1, 4, 100, 100)),
    *((4, 64, 56, 56), (8, 2048, 7, 7), (3, 24, 5, 6), (2, 16, 3, 4, 5), (2, 1, 1, 1), (1, 2, 1, 3), (2, 9000, 2, 2)),
)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
RELU = Activation("relu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
EPS = 2.0**-24


def drawn(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def laid_out(t: Tensor, last: bool) -> Tensor:
    return t.contiguous(memory_format=LAST[t.dim()]) if last and t.dim() in LAST else t


def column(values: Tensor, like: Tensor) -> Tensor:
    return values.double().reshape(1, -1, *(1,) * (like.dim() - 2))


class Run:
    """One call with its backward: output, gradients and running statistics."""

    def __init__(self, by: Any, x: Tensor, values: list[Tensor], dy: Tensor, residual: Tensor | None, act: Any) -> None:
        mean, var, weight, bias = (v.clone() for v in values)
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        leaves = [x, weight, bias]
        if residual is not None:
            residual = residual.detach().requires_grad_()
            leaves.append(residual)
        self.y = by(x, mean, var, weight, bias, residual, act)
        self.gradients = torch.autograd.grad(self.y, leaves, dy)
        self.mean, self.var = mean, var

    def tensors(self) -> list[Tensor]:
        return [self.y, self.mean, self.var, *self.gradients]


def ours(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, act: Any) -> Tensor:
    return ops.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-3, act, residual=residual)


def theirs(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, act: Any) -> Tensor:
    out = F.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-3)
    return act(out if residual is None else out + residual)


def wide(t: Tensor | None) -> Any:
    return None if t is None else t.double()


def check(x: Tensor, kept: torch.dtype, act: Any = NONE, residual: Tensor | None = None) -> None:
    """Ours is at most 1.5 times as far from float64 as PyTorch's, or within what float32 and one rounding make."""
    values = [drawn((x.shape[1],), kept, m) for m in (0.2, 0.0, 1.0, 0.0)]
    values[1] = (values[1].abs() + 0.1).to(kept)
    dy = torch.empty_like(x).normal_()
    mine, eager = (Run(by, x, values, dy, residual, act) for by in (ours, theirs))
    exact = Run(theirs, wide(x), [v.double() for v in values], wide(dy), wide(residual), act)
    names = ("y", "mean", "var", "dx", "dweight", "dbias", "dresidual")
    dense = x.movedim(1, 0).flatten(1).double()
    size = float((dense.abs().amax(1) / (dense.var(1, correction=0) + 1e-3).sqrt()).max()) + 4.0
    for name, a, b, c in zip(names, mine.tensors(), eager.tensors(), exact.tensors(), strict=False):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), name
        eps = torch.finfo(a.dtype).eps
        scale = max(float(c.abs().max()), float((x.double().abs().max() if name in ("mean", "var") else 0)), 1e-3)
        rough = act is not NONE and name.startswith("d")  # who is on which side of a corner
        error, other = ((t.double() - c).abs() for t in (a, b))
        kind = "quantile" if rough else "max"
        worst = [float(e.flatten().kthvalue(max(1, int(0.999 * e.numel()))).values if kind == "quantile" else e.max())
                 for e in (error, other)]
        limit = 1.5 * worst[1] + eps * scale + 64 * EPS * scale * size
        assert worst[0] <= limit, (name, worst, limit)
    assert mine.y.stride() == x.stride()
    again = Run(ours, x, values, dy, residual, act)
    assert all(same_bits(a, b) for a, b in zip(mine.tensors(), again.tensors(), strict=True))


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_pytorchs_error(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    for mean in (0.0, 100.0, 1000.0):
        x = laid_out(drawn(shape, dtype, mean), last)
        for kept in {dtype, torch.float32}:
            check(x, kept)


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", RESNET50, ids=str)
def test_resnets_with_relu_and_residual(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    shape = (8, *shape[1:])
    x, residual = (laid_out(drawn(shape, dtype), last) for _ in range(2))
    check(x, torch.float32)
    check(x, torch.float32, RELU)
    check(x, torch.float32, RELU, residual)
