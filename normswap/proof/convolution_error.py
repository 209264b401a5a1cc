"""How far a norm folded into the convolution before it may lie off: a derived bound, and PyTorch's own error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, half_ulp

MOST = 1.5
"""At most so many times PyTorch's own error of a region, in the root of their mean squares, may ours be in 16 bits and
in TF32. In float32 what either rounds is as small as what its sums make, of which the order is the convolution's."""

_C_SUMS, _C_ROUNDED = 8.0, 4.0
_TF32 = 2.0**-11


def folded_error(convolution: Any, norm: Any, x: Tensor, z: Tensor, dtype: torch.dtype, real: Tensor) -> Tensor:
    """The most by which the norm's value may differ from float64's, of float64 modules, input and convolution ``z``;
    ``real`` is the input as it was, ``dtype`` what its convolution gives.

    With the gain g = weight rstd and W' = g W, the sum runs through A = |g| (|W| * |x| + |b| + |mean|) + |beta|:
    float32 arithmetic makes c 2^-24 A of that at most; a sum that begins with the bias rounds at its size K times, of
    either sign. Each weight is rounded by at most d, half an ulp of W' in its dtype, or by g times what W loses where
    autocast rounds it and the sums are scaled: errors of either sign, so that their sum is at most
    4 (d^2 * x^2)^(1/2), seven of its standard deviations. The new bias is rounded once. PyTorch's own sequence rounds z
    instead, which is allowed too.

    A float32 convolution that takes TF32 rounds W' and x, to 2^-11 of each: 4 sqrt(2) (d^2 * x^2)^(1/2), and 2^-10 of
    g W * x, should it cut them off instead.
    """
    shape = (1, -1, *(1,) * (z.dim() - 2))
    rstd = (norm.running_var + norm.eps).rsqrt()
    gain = rstd if norm.weight is None else rstd * norm.weight
    offset = torch.zeros_like(rstd) if norm.bias is None else norm.bias
    own = torch.zeros_like(rstd) if convolution.bias is None else convolution.bias
    columns = _of_weight(gain, convolution).reshape(*convolution.weight.shape[:2], *shape[2:])
    weight = convolution.weight * columns
    tf32 = takes_tf32(real)
    unit = _TF32 if tf32 else FLOAT32_ROUNDING
    rounded = unit * weight.abs()
    if dtype in (torch.float16, torch.bfloat16):
        lost = (convolution.weight.to(dtype).double() - convolution.weight).abs()
        rounded = torch.maximum(half_ulp(weight, dtype), columns.abs() * lost)
    geometry = convolution.stride, convolution.padding, convolution.dilation
    how = *geometry, convolution.transposed, convolution.output_padding, convolution.groups
    sums = torch.convolution(x.abs(), weight.abs(), None, *how)
    spread = torch.convolution(x.square(), rounded.square(), None, *how).clamp(min=0.0).sqrt()
    across = (gain.abs() * (own.abs() + norm.running_mean.abs()) + offset.abs()).view(shape)
    shift = (gain * (own - norm.running_mean) + offset).view(shape)
    terms = weight.numel() / len(gain)
    error = FLOAT32_ROUNDING * (_C_SUMS * sums + max(_C_SUMS, 2 * terms**0.5) * across) + _C_ROUNDED * spread
    if tf32:
        error += (2**0.5 - 1) * _C_ROUNDED * spread + 2 * _TF32 * ((z - own.view(shape)) * gain.view(shape)).abs()
    return error + half_ulp(shift, dtype) + half_ulp(z, dtype) * gain.abs().view(shape)


def _of_weight(gain: Tensor, convolution: Any) -> Tensor:
    """The gain of what each matrix of taps of the convolution's weight adds to."""
    rows, columns = convolution.weight.shape[:2]
    if not convolution.transposed:
        return gain.view(-1, 1).expand(rows, columns)
    return gain.view(-1, 1, columns).expand(-1, rows // convolution.groups, columns)


def takes_tf32(x: Tensor) -> bool:
    """Whether a convolution of ``x`` rounds its operands to TF32."""
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return x.is_cuda and x.dtype is torch.float32 and conv.fp32_precision == "tf32"


def times_pytorchs(ours: Tensor, eager: Tensor, expected: Tensor) -> float:
    """The root mean square error of ours as a multiple of PyTorch's, over what is finite in all; 1 where both are 0."""
    finite = ours.isfinite() & eager.isfinite() & expected.isfinite()
    mine, theirs = ((t.double() - expected)[finite].square().sum() for t in (ours, eager))
    return 1.0 if mine <= theirs else float((mine / theirs).sqrt())
