"""When two results of a normalisation are the same: error bounds as pure functions of float64 tensors.

An element passes when ``|ours - ref| <= half an ulp of ref in the output's dtype + c 2^-24 A``, where ``ref`` is the
original site run in float64 and ``A`` the magnitude its sums run through in float32: an error of that size is what
float32 arithmetic makes, a forgotten bias or a wrong eps is far larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_STATISTICS = (_aten.mean, _aten.norm, _aten.linalg_vector_norm)
_OF_A_NUMBER = (_aten.add.Tensor, _aten.add.Scalar, _aten.clamp.default, _aten.clamp_min.default)

FLOAT32_ROUNDING = 2.0**-24
_PIECE = 2**20  # elements of a large tensor that are computed with at once
SIXTEEN_BITS = (torch.float16, torch.bfloat16)

_PYTORCH_ROUNDINGS = 4.0
"""What a gradient or a buffer may miss by, in unit roundoffs of its dtype times A, where PyTorch's own code serves: on
a CPU it sums weight gradients in 16 bits, rounds between the ops of an expression and mixes running statistics in
their dtype. Its worst over hundreds of random cases is 1. Not granted where our kernels ran: those round once."""


@dataclass(frozen=True)
class Magnitudes:
    """Float64 magnitudes A of the output, of the gradients as a function of the cotangent dy (one tensor for "input"
    and one for each parameter's name) and of buffers after the call. ``coarse`` and ``coarse_buffers`` bound what a
    matmul with unit roundoff ``coarse_unit``, where coarser than float32's, adds."""

    output: Tensor
    gradients: Callable[[Tensor], dict[str, Tensor]]
    coarse: Tensor | None = None
    coarse_unit: float = 0.0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    coarse_buffers: Mapping[str, Tensor] = field(default_factory=dict)


def half_ulp(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of ``dtype`` at each value of a float64 tensor."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(reference.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(reference, info.eps / 2), exponent - 1)


def rounds_further(reference: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """What half an ulp grows by where a value off by ``error`` lies beyond a power of two."""
    return half_ulp(reference.abs() + error, dtype) - half_ulp(reference, dtype)


def limit_of(reference: Tensor, dtype: torch.dtype, magnitude: Tensor, c: float, extra: Tensor | float) -> Tensor:
    """How far a value of ``dtype`` may lie off."""
    return half_ulp(reference, dtype) + c * FLOAT32_ROUNDING * magnitude + extra


def error_share(ours: Tensor, reference: Tensor, magnitude: Tensor, c: float, extra: Tensor | float = 0.0) -> float:
    """The largest error as a share of its limit (1 is the limit), over elements finite in both.

    ``reference`` and ``magnitude`` are float64 and broadcast to ``ours``; ``extra`` is added to the limit. An error
    without a limit (a NaN in it) is infinitely too large.
    """
    given = (ours, reference, magnitude, torch.as_tensor(extra, dtype=torch.float64, device=ours.device))
    pieces = zip(*(_split(tensor.expand(ours.shape)) for tensor in given), strict=True)
    return max((_share(o, r, m, e, c) for o, r, m, e in pieces), default=0.0)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of ``tensor`` small enough to compute with, along its largest dim; none of an empty one."""
    if tensor.numel() == 0:
        return ()
    if tensor.numel() <= _PIECE:
        return (tensor,)
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    return tensor.split(max(1, _PIECE * tensor.shape[dim] // tensor.numel()), dim)


def _share(ours: Tensor, reference: Tensor, magnitude: Tensor, extra: Tensor, c: float) -> float:
    limit = limit_of(reference, ours.dtype, magnitude, c, extra)
    error = (ours.double() - reference).abs()
    finite = ours.isfinite() & reference.to(ours.dtype).isfinite()
    share = torch.where(finite & (error > 0), error / limit, 0.0)
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())


def excused(eager: Tensor, reference: Tensor) -> Tensor:
    """Where PyTorch is not finite and the float64 reference is: PyTorch is the one that is wrong there."""
    return ~eager.isfinite() & reference.expand(eager.shape).to(eager.dtype).isfinite()


def mask_mismatch(ours: Tensor, eager: Tensor, reference: Tensor) -> str:
    """How the NaN and Inf of ours differ from PyTorch's, "" when they do not. Where PyTorch is not finite, nothing is
    counted if the float64 reference is, nor what the reference rounds to: an Inf where PyTorch's overflowed on the
    way, and is NaN."""
    rounded = reference.expand(eager.shape).to(eager.dtype)
    counted = eager.isfinite() | ~(rounded.isfinite() | (eager.isnan() & (ours == rounded)))
    nan = int(((ours.isnan() != eager.isnan()) & counted).sum())
    inf = int(((ours.isinf() | eager.isinf()) & (ours != eager) & counted).sum())
    return f"NaN differs from PyTorch's in {nan} elements, Inf in {inf}" if nan or inf else ""


def matmul_unit(x: Tensor) -> float:
    """The unit roundoff of a matmul of ``x`` here and now where coarser than float32's (16 bits, TF32), else 0."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype in SIXTEEN_BITS:
        return torch.finfo(dtype).eps / 2
    # Not allow_tf32: reading it raises once anybody has set the newer fp32_precision.
    return 2.0**-11 if x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32" else 0.0


def own_rounding(dtype: torch.dtype, kernel_ran: bool) -> float:
    """What the limit of a gradient or buffer gains per A where PyTorch's own code serves, else 0."""
    return 0.0 if kernel_ran else _PYTORCH_ROUNDINGS * torch.finfo(dtype).eps / 2


class RoundedStatistics(torch.utils._python_dispatch.TorchDispatchMode):
    """Round every mean and norm, and what a number is added to or clamps, to ``dtype`` and back: the casts that
    ``x / (mean(|x|) + eps)`` makes on 16-bit tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A sum of two tensors is the backward's, which accumulates gradients.
        rounds = func.overloadpacket in _STATISTICS or (func in _OF_A_NUMBER and not isinstance(args[1], Tensor))
        return out.to(self.dtype).to(out.dtype) if rounds else out
