"""The gradients of the row norms in closed form, in float64, each with the magnitude that its sums run through, by
which the criterion of the proof measures errors."""

from __future__ import annotations

from torch import Tensor

Gradient = tuple[Tensor, Tensor]


def layer_norm_gradients(x: Tensor, w: Tensor, dy: Tensor, eps: float) -> list[Gradient]:
    """Of x, weight and bias."""
    rstd = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    xhat, size = (x - x.mean(-1, keepdim=True)) * rstd, rstd * (x.abs() + x.square().mean(-1, keepdim=True).sqrt())
    g = dy * w
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    g = g.abs()
    through = g + g.mean(-1, keepdim=True) + size * (g * size).mean(-1, keepdim=True)
    return [(dx, rstd * through), ((dy * xhat).sum(0), (dy.abs() * size).sum(0)), (dy.sum(0), dy.abs().sum(0))]


def rms_norm_gradients(x: Tensor, factor: Tensor, dy: Tensor, eps: float) -> list[Gradient]:
    """Of x and weight; ``factor`` is the weight and its offset."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat, g = x * rstd, dy * factor
    size = rstd * (x.abs() + x.square().mean(-1, keepdim=True).sqrt())
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    through = g.abs() + size * (g.abs() * size).mean(-1, keepdim=True)
    return [(dx, rstd * through), ((dy * xhat).sum(0), (dy.abs() * size).sum(0))]


def l1_norm_gradients(
    x: Tensor, dy: Tensor, eps: float, minimum: float | None, mean: Tensor | None = None
) -> list[Gradient]:
    """Of x; ``mean`` is that of the magnitudes as rounded to the dtype, where it has been."""
    mean = x.abs().mean(-1, keepdim=True) if mean is None else mean
    follows = 1.0 if minimum is None else (mean >= minimum).to(x.dtype)
    divisor = (mean if minimum is None else mean.clamp(min=minimum)) + eps
    dx = dy / divisor - x.sign() * follows * (dy * x).mean(-1, keepdim=True) / divisor.square()
    return [(dx, dy.abs() / divisor + (dy * x).abs().mean(-1, keepdim=True) / divisor.square())]
