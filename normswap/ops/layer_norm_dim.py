"""Layer normalisation along any dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    in_memory_order,
    native_serves,
)
from normswap.ops.layer_norm import layer_norm
from normswap.ops.recorded import differentiable


def layer_norm_dim(
    x: Tensor, dim: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation along one ``dim``, such as the channels of an NCHW tensor, without a copy.

    ``weight`` and ``bias`` are vectors, one value per index along ``dim``. Returns the shape and dtype of ``x``
    (float32 under autocast), laid out as elementwise operations give it. Raises TypeError for an ``x`` that is not
    floating-point, IndexError for a ``dim`` out of range, ValueError for a weight or bias of another shape.
    """
    op = direct("layer_norm_dim", x, weight, bias)
    if op is not None:
        out = op(x, dim, weight, bias, eps)
        if out is not None:
            return out
    _check_along("layer_norm_dim", x, dim, weight, bias)
    x, weight, bias = autocast_to_float(x, weight, bias)  # type: ignore[assignment]
    if not (native_serves(x, weight, bias) and 0 not in x.stride() and x.numel() > 0):
        return reference.layer_norm_dim(x, dim, weight, bias, eps)
    return in_memory_order(lambda t, along: _layer_norm_along(t, along, weight, bias, eps), x, dim)


def _check_along(op: str, x: Tensor, dim: int, *parameters: Tensor | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{op}: x must be floating-point, got {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{op}: dim must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    for p in parameters:
        if p is not None and p.shape != (x.shape[dim],):
            raise ValueError(
                f"{op}: weight and bias must have shape ({x.shape[dim]},), one value per index along dim {dim} of x "
                f"{tuple(x.shape)}; got {tuple(p.shape)}"
            )


def _layer_norm_along(x: Tensor, dim: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if math.prod(x.shape[dim + 1 :]) == 1 and affine_dtypes_fit(x, weight, bias):  # rows
        return layer_norm(x.flatten(dim), x.shape[dim : dim + 1], weight, bias, eps).view(x.shape)

    def compute(learns: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops.normswap.layer_norm_dim.default(x, dense(weight), dense(bias), dim, eps, out, None, None)
        return (out,)

    formula = lambda x, w, b: reference.layer_norm_dim(x, dim, w, b, eps)  # noqa: E731
    return differentiable(compute, lambda *_: None, formula, x, weight, bias)
