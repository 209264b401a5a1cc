"""Division by the Euclidean norm, along a dim or of the whole tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import direct, in_memory_order, native_serves, statistic_along
from normswap.ops.recorded import differentiable


def l2_norm(x: Tensor, dim: int = -1, eps: float = 0.0) -> Tensor:
    """``torch.nn.functional.normalize(x, dim=dim, eps=eps)`` in one pass over memory; with ``eps`` 0 it is
    ``x / x.norm(p=2, dim=dim, keepdim=True)``, which makes NaN of zeros.

    The norm is rounded to the dtype of ``x`` before the division, as the expression does, and so is ``eps``. Returns
    the shape and dtype of ``x`` (float32 under autocast), laid out as the expression's. Raises what the expression
    raises.
    """
    op = direct("l2_norm", x)
    if op is not None and eps >= 0.0 and -x.dim() <= dim < x.dim():
        out = op(x, dim, eps)
        if out is not None:
            return out
    if not (_is_served(x) and eps >= 0.0 and -x.dim() <= dim < x.dim()):
        return reference.l2_norm(x, dim, eps)
    return in_memory_order(lambda t, along: _l2_norm(t, along, eps), x, dim)


def frobenius_norm(x: Tensor) -> Tensor:
    """``x / x.norm()`` of the whole tensor, the norm rounded to its dtype as the expression does; zeros give NaN.

    Returns the shape and dtype of ``x`` (float32 under autocast), laid out as the expression's. Raises what the
    expression raises.
    """
    op = direct("frobenius_norm", x)
    if op is not None:
        out = op(x)
        if out is not None:
            return out
    if not (_is_served(x) and x.dim() > 0):
        return reference.frobenius_norm(x)
    return in_memory_order(lambda t, _: _l2_norm(t, None, 0.0), x, 0)


def _is_served(x: Tensor) -> bool:
    """Of an expanded tensor the elementwise operations give strides of their own; autocast takes a norm in float32."""
    return (
        native_serves(x)
        and x.numel() > 0
        and 0 not in x.stride()
        and (x.dtype is torch.float32 or not torch.is_autocast_enabled("cuda"))
    )


def _l2_norm(x: Tensor, dim: int | None, eps: float) -> Tensor:
    """Along ``dim``; of the whole tensor without one."""

    def compute(learns: bool, x: Tensor) -> tuple[Tensor, Tensor | None]:
        norm = None
        if learns:
            norm = x.new_empty((), dtype=torch.float32) if dim is None else statistic_along(x, dim)
        x = x.contiguous()
        out = torch.empty_like(x)
        if dim is None or math.prod(x.shape[dim + 1 :]) == 1:  # rows
            cols = x.numel() if dim is None else x.shape[dim]
            torch.ops.normswap.l2_norm.default(x, cols, eps, out, norm, 0)
        else:
            torch.ops.normswap.l2_norm_dim.default(x, dim, eps, out, norm)
        return out, norm

    def kernels(_: Any, grad: Tensor, x: Tensor, norm: Tensor) -> tuple[Tensor]:
        return (gradient(grad, x, norm, dim, eps),)

    formula = lambda t: reference.frobenius_norm(t) if dim is None else reference.l2_norm(t, dim, eps)  # noqa: E731
    return differentiable(compute, kernels, formula, x)


def gradient(grad: Tensor, x: Tensor, norm: Tensor, dim: int | None, eps: float = 0.0) -> Tensor:
    """The gradient of ``l2_norm``, or without a ``dim`` of ``frobenius_norm``, in closed form, in float32 or better,
    rounded once to the dtype of ``x``.

    With the ``norm`` n rounded to that dtype, d = max(n, eps) and y = x / d: ``dx = dy / d - x / n sum(dy y) / d``
    where n >= eps and n > 0, and ``dx = dy / d`` elsewhere.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rounded = norm.to(x.dtype)
    divisor = rounded.clamp_min(eps) if eps else rounded
    n, d = rounded.to(wide), divisor.to(wide)
    values, dy = x.to(wide), grad.to(wide)
    sums = (dy * (values / d)).sum() if dim is None else (dy * (values / d)).sum(dim, keepdim=True)
    passed = (sums / d / n).where((rounded == divisor) & (rounded > 0), 0.0)
    return (dy / d).addcmul_(values, passed, value=-1).to(x.dtype)
