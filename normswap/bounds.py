"""What the magnitudes A of several kinds are made of, for ``criterion``: those that the sums of a norm run through in
float32, output and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, SIXTEEN_BITS, Magnitudes


class Rows:
    """Rows of ``flat`` (*, N) with weight and bias that broadcast to it: the last dims of ``x``, or with ``groups``
    those of the dim ``channel``, which has a weight each. Their mean is taken from them where they are ``centred``."""

    def __init__(self, site: Any, x: Tensor, centred: bool = True, groups: int = 0, channel: int = 1) -> None:
        self.shape, self.weight, self.bias = x.shape, site.weight, getattr(site, "bias", None)
        self.group, self.channel, self.centred = groups > 0, channel, centred
        self.flat = x.reshape(*x.shape[:channel], groups, -1) if groups else self._rows(x, site.normalized_shape)
        eps = torch.finfo(torch.float32).eps if site.eps is None else site.eps
        square = self.flat.square().mean(-1, keepdim=True)
        spread = self.flat.var(-1, correction=0, keepdim=True) if self.centred else square
        self.rstd = (spread + eps).rsqrt()
        self.xhat = self.rstd * (self.flat.abs() + (square.sqrt() if self.centred else 0.0))

    @staticmethod
    def _rows(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
        lead = x.shape[: x.dim() - len(normalized_shape)] or (1,)  # the whole tensor may be one row
        return x.reshape(*lead, -1)

    def _affine(self, parameter: Tensor | None, absent: float) -> Tensor:
        if parameter is None:
            return torch.full((), absent, dtype=torch.float64, device=self.flat.device)
        if not self.group:
            return parameter.abs().reshape(-1)
        return parameter.abs().view(-1, *(1,) * (len(self.shape) - self.channel - 1))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(self.shape) if self.group else flat

    def output(self) -> Tensor:
        out = self._shaped(self.xhat) * self._affine(self.weight, 1.0) + self._affine(self.bias, 0.0)
        return out.reshape(self.shape)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs() if self.group else dy.abs().reshape(self.flat.shape)
        g = (dy * self._affine(self.weight, 1.0)).reshape(self.flat.shape)
        through = g + self.xhat * (g * self.xhat).mean(-1, keepdim=True)
        if self.centred:
            through = through + g.mean(-1, keepdim=True)
        found = {"input": (self.rstd * through).reshape(self.shape)}
        for name, parameter, terms in (("weight", self.weight, dy * self._shaped(self.xhat)), ("bias", self.bias, dy)):
            if parameter is not None:
                kept = self.channel if self.group else terms.dim() - 1
                found[name] = terms.sum([d for d in range(terms.dim()) if d != kept]).reshape(parameter.shape)
        return found

    def magnitudes(self) -> Magnitudes:
        """Of the output and of the gradients."""
        return Magnitudes(self.output(), self.gradients)


def derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf.clone()).sum(), leaf)  # it may write to what it is given
    return found


def ulp_at_ties(value: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of a 16-bit ``dtype`` where float32 arithmetic cannot tell to which
    side ``value`` rounds, and either neighbour is right; 1 elsewhere."""
    low, high = (value * (1 - 2.0**-21)).to(dtype), (value * (1 + 2.0**-21)).to(dtype)
    return ulp_where(low != high, dtype, c)


def ulp_where_rounded(divisor: Tensor, eps: float, minimum: float | None, dtype: torch.dtype, c: float = 4.0) -> Tensor:
    """The same where a ``divisor`` is rounded to ``dtype`` after each step: clamped to ``minimum``, ``eps`` added."""
    if dtype not in SIXTEEN_BITS:
        return torch.ones_like(divisor)
    low, high = (_rounded(divisor, eps, minimum, dtype, side * 2.0**-21) for side in (-1, 1))
    return ulp_where(low != high, dtype, c)


def ulp_where(tie: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of ``dtype`` where there is a tie; 1 elsewhere."""
    return torch.where(tie, torch.finfo(dtype).eps / (c * FLOAT32_ROUNDING), 1.0)


def _rounded(divisor: Tensor, eps: float, minimum: float | None, dtype: torch.dtype, error: float) -> Tensor:
    """With a relative ``error`` before each rounding."""
    divisor = (divisor * (1 + error)).to(dtype)
    if minimum is not None:
        divisor = divisor.double().clamp(min=minimum * (1 + error)).to(dtype)
    return ((divisor.double() + eps) * (1 + error)).to(dtype) if eps else divisor
