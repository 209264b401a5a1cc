"""How far a norm behind a product may lie off: the magnitudes that the sums of ``bn(linear(x) * scale)`` run through,
and the error of a norm folded into the convolution before it, a derived bound and PyTorch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, Magnitudes, half_ulp, input_gradient
from normswap.regions.spec import Region

C_LINEAR = 8.0
"""What an error may be in units of 2^-24 times the magnitude: a path through it rounds about twice as often as one
through a norm: a matmul, a product with the scale, a norm, a matmul back."""


class LinearMagnitudes:
    """Those of ``region``, whose ``children`` are as they were before the call, on a float64 ``x``: of
    u = scale * linear(x) for x (N, K), normalised column by column to uhat.

    ``sums`` is the magnitude of linear(x), ``size`` that of uhat, ``coarse`` (of u) what a matmul with rounded operands
    and a rounded result moves it by, in unit roundoffs: its K errors are independent, hence the root of squares.
    """

    def __init__(self, region: Region, children: Mapping[str, Any], x: Tensor, scale: Any) -> None:
        self.x, self.names = x, (region.linear, region.norm, ".".join(region.factor[:2]) or "scale")
        self.linear, self.bn = children[region.linear], children[region.norm]
        if region.factor:
            scale = getattr(children[region.factor[0]], region.factor[1])
        self.scale = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=x.device)
        self.batch = bool(self.bn.training or self.bn.running_mean is None)
        z, bias = self.linear(x), self.linear.bias
        u, slope = z * self.scale, self.scale.abs()
        self.sums = x.abs() @ self.linear.weight.abs().T + (0.0 if bias is None else bias.abs())
        mean, self.var = (
            (u.mean(0), u.var(0, correction=0)) if self.batch else (self.bn.running_mean, self.bn.running_var)
        )
        self.rstd = (self.var + self.bn.eps).rsqrt()
        weight, offset = self.bn.weight, self.bn.bias
        self.gamma = torch.ones_like(self.rstd) if weight is None else weight.abs()
        self.beta = torch.zeros_like(self.rstd) if offset is None else offset.abs()
        self.gain = slope * self.rstd
        self.centred = (u - mean).abs()
        self.uhat = self.centred * self.rstd
        self.size = self.gain * self.sums + (self.gain * self.sums.mean(0) if self.batch else mean.abs() * self.rstd)
        self.coarse = slope * ((x.square() @ self.linear.weight.square().T).sqrt() + z.abs())

    def magnitudes(self, unit: float) -> Magnitudes:
        """The gradients by "input", "scale" and the names of parameters. ``unit`` is what ``matmul_unit`` says of the
        real input."""
        coarse = self.coarse * self.rstd
        if self.batch:
            coarse = self._through(coarse + coarse.mean(0))
        else:  # folding rounds the new bias too
            coarse = self._through(coarse + self.size - self.gain * self.sums) + self.beta
        buffers, coarse_buffers = self._buffers()
        output = self._through(self.size) + self.beta
        return Magnitudes(output, self.gradients, coarse, unit, buffers, coarse_buffers)

    def _through(self, error: Tensor) -> Tensor:
        """What errors of that size in uhat do to the output: in a batch they move the variance, and so every row."""
        return self.gamma * (error + self.uhat * (self.uhat * error).mean(0) if self.batch else error)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs()
        du = input_gradient(dy, self.uhat, self.size, lambda values: values.mean(0)) if self.batch else dy
        of_scale = (self.gamma * self.rstd * du * self.sums).sum(0)
        dz = self.gamma * self.gain * du
        del du
        linear, bn, scale = self.names
        return {
            "input": dz @ self.linear.weight.abs(),
            f"{linear}.weight": dz.T @ self.x.abs(),
            f"{linear}.bias": dz.sum(0),
            f"{bn}.weight": (dy * self.size).sum(0),
            f"{bn}.bias": dy.sum(0),
            scale: (of_scale if self.scale.numel() > 1 else of_scale.sum()).reshape(self.scale.shape),
        }

    def _buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Magnitudes of the running statistics after a call in training, and what a coarse matmul adds to them."""
        bn, rows = self.bn, len(self.x)
        if not bn.training or bn.running_mean is None or rows < 2:
            return {}, {}
        tracked = 0.0 if bn.num_batches_tracked is None else float(bn.num_batches_tracked)
        new = 1.0 / (tracked + 1.0) if bn.momentum is None else bn.momentum
        unbiased = new * rows / (rows - 1)
        error = self.scale.abs() * self.sums
        spread = 2 * (self.centred * (error + error.mean(0))).mean(0)
        size = {
            "running_mean": (1 - new) * bn.running_mean.abs() + new * error.mean(0),
            "running_var": (1 - new) * bn.running_var.abs() + unbiased * (self.var + spread),
        }
        coarse = {
            "running_mean": new * self.coarse.mean(0),
            "running_var": unbiased * 2 * (self.centred * self.coarse).mean(0),
        }
        return size, coarse


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
