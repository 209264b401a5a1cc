"""Rows for the tests of layer_norm, rms_norm and l1_norm on the GPU, and what each is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from limits import assert_within
from torch import Tensor

from normswap import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (
    *(1, 2, 7, 31, 32, 33, 64, 65, 127, 128, 130, 255, 256, 258, 769, 1000, 1001, 1023, 1025),
    *(1032, 1280, 1536, 1544, 2047, 2050, 4096),
)
LONG = (4097, 8192, 16383, 16386, 20480, 32768, 65535, 65536, 81920, 100001, 131073, 262144, 262146)
WEIGHTS = {"layer_norm": 2, "rms_norm": 1, "l1_norm": 0}
"""That an element may have of its own."""


def values(rows: int, cols: int, dtype: torch.dtype, mean: float, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + rows + cols)
    return (torch.randn(rows, cols, generator=generator, device="cuda") + mean).to(dtype)


def affine(cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(cols)
    weight = torch.randn(cols, generator=generator, device="cuda") + 0.5
    return weight.to(dtype), torch.randn(cols, generator=generator, device="cuda").to(dtype)


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> None:
    ours = ops.layer_norm(x, x.shape[-1:], weight, bias, eps)
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    rstd = (x64.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    magnitude = w64.abs() * rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()) + b64.abs()
    assert_within(ours, F.layer_norm(x64, x.shape[-1:], w64, b64, eps), magnitude, f"layer_norm {tuple(x.shape)}")


def check_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    ours = ops.rms_norm(x, x.shape[-1:], weight, eps)
    reference = F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)
    assert_within(ours, reference, reference.abs(), f"rms_norm {tuple(x.shape)}")


def check_l1_norm(x: Tensor) -> None:
    ours = ops.l1_norm(x, -1)
    mean = x.double().abs().mean(-1, keepdim=True)
    reference = x.double() / mean.to(x.dtype).double()
    # Where the mean lies within float32 error of a tie of its dtype, its rounding may go the other way: one ulp.
    ulp = 0.0 if x.dtype is torch.float32 else torch.finfo(x.dtype).eps
    low, high = (mean * (1 - 2**-21)).to(x.dtype), (mean * (1 + 2**-21)).to(x.dtype)
    tie = ulp * reference.abs() * (low != high) * 2.0**24 / 4
    assert_within(ours, reference, reference.abs() + tie, f"l1_norm {tuple(x.shape)}")


NO_OPTIONS = (None, None, None, 0, 0.0, 0.0)


def forced(kind: str, x: Tensor, weight: Tensor, bias: Tensor, regime: int) -> Tensor:
    out = torch.full_like(x, float("nan"))
    if kind == "layer_norm":
        torch.ops.normswap.layer_norm(x, 1, weight, bias, 1e-5, *NO_OPTIONS, out, None, None, None, regime)
    elif kind == "rms_norm":
        torch.ops.normswap.rms_norm(x, 1, weight, 1e-5, 0.0, False, *NO_OPTIONS, out, None, None, regime)
    else:
        torch.ops.normswap.l1_norm(x, x.shape[-1], 0.0, 0.0, out, None, regime)
    return out


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)
