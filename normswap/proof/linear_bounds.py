"""The magnitudes that the sums of ``bn(linear(x) * scale)`` run through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normswap.criterion import Magnitudes
from normswap.regions.spec import Region

C = 8.0
"""What an error may be in units of 2^-24 times the magnitude: a path through it rounds about twice as often as one
through a norm: a matmul, a product with the scale, a norm, a matmul back."""


def linear_magnitudes(region: Region, children: Mapping[str, Any], x: Tensor, scale: Any, unit: float) -> Magnitudes:
    """Those of ``region``, whose ``children`` are as they were before the call, on a float64 ``x``; the gradients by
    "input", "scale" and the names of parameters. ``unit`` is what ``matmul_unit`` says of the real input."""
    return _Columns(region, children, x, scale).magnitudes(unit)


class _Columns:
    """u = scale * linear(x) for x (N, K), normalised column by column to uhat.

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
        du = self._input_gradient(dy)
        dz = self.gamma * self.gain * du
        linear, bn, scale = self.names
        columns = self.gamma * self.rstd * du * self.sums
        return {
            "input": dz @ self.linear.weight.abs(),
            f"{linear}.weight": dz.T @ self.x.abs(),
            f"{linear}.bias": dz.sum(0),
            f"{bn}.weight": (dy * self.size).sum(0),
            f"{bn}.bias": dy.sum(0),
            scale: (columns.sum(0) if self.scale.numel() > 1 else columns.sum()).reshape(self.scale.shape),
        }

    def _input_gradient(self, dy: Tensor) -> Tensor:
        """Terms of dy - mean(dy) - uhat mean(dy uhat), and what an error of uhat does to them: through each uhat, and
        through rstd in front of all."""
        if not self.batch:
            return dy
        terms = dy + dy.mean(0) + self.uhat * (dy * self.uhat).mean(0)
        moved = self.size * (dy * self.uhat).mean(0) + self.uhat * (dy * self.size).mean(0)
        return terms * (1 + (self.uhat * self.size).mean(0)) + moved

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
