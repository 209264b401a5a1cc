"""Scale -> BatchNorm, and its fold into a Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import (
    dense,
    native_serves,
    needs_grad,
    reference_gradients,
)


def scale_batch_norm(
    input: Tensor,
    scale: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    input_bias: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.batch_norm((input + input_bias) * scale, ...)`` for ``input`` (N, C) without storing the
    product.

    ``scale`` has shape (), (1,), (C,) or (1, C) and the input's dtype. With ``u = scale * input``, batch mean and
    biased variance of ``u`` come from those of ``input``: ``scale * mean`` and ``scale^2 * var`` (Ioffe & Szegedy
    2015 for the rest). In training the running statistics, where given, are updated as PyTorch does (unbiased
    variance); ``input_bias`` (C,) then enters the running mean alone, since the batch's statistics cancel it in all
    else; where it is not finite, neither is what comes of its column. Raises what PyTorch's op raises.
    """
    vectors = (running_mean, running_var, weight, bias, input_bias)
    if not (
        native_serves(input, scale, *vectors)
        and input.dim() == 2
        and not torch.is_autocast_enabled("cuda")
        and input.shape[0] > (1 if training else 0)
        and (eps > 0 or not training)  # PyTorch raises ValueError
        and not (training and torch.compiler.is_compiling())  # the compiler is left to update the running statistics
        and input.shape[1] > 0
        and (scale is None or _is_channel_scale(scale, input))
        and all(v is None or v.shape == input.shape[1:] for v in vectors)
        and (input_bias is None or input_bias.dtype == input.dtype)
        and (training or (running_mean is not None and running_var is not None and input_bias is None))
    ):
        return reference.scale_batch_norm(
            input, scale, running_mean, running_var, weight, bias, training, momentum, eps, input_bias
        )
    if training:
        return _ScaleBatchNorm.apply(input, input_bias, scale, weight, bias, running_mean, running_var, momentum, eps)
    if needs_grad(input, scale, weight, bias):
        return reference.scale_batch_norm(input, scale, running_mean, running_var, weight, bias, False, momentum, eps)
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.affine.default(
        input, _per_channel(scale, input), running_mean, running_var, weight, bias, eps, out
    )
    return out


def _is_channel_scale(scale: Tensor, input: Tensor) -> bool:
    """True when ``input * scale`` scales whole columns of ``input`` (N, C) and keeps its shape and dtype."""
    channels = input.shape[1]
    return scale.dtype == input.dtype and scale.shape in ((), (1,), (channels,), (1, channels))


def _per_channel(scale: Tensor | None, input: Tensor) -> Tensor | None:
    return None if scale is None else scale.reshape(-1).expand(input.shape[1]).contiguous()


class _ScaleBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        input_bias: Any,
        scale: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        momentum: float,
        eps: float,
    ) -> Tensor:
        columns = input.contiguous()
        out = torch.empty_like(columns)
        mean = input.new_empty(input.shape[1], dtype=torch.float32)
        rstd = torch.empty_like(mean)
        affine = (_per_channel(scale, input), weight, bias)
        torch.ops.normswap.scale_batch_norm.default(
            columns, dense(input_bias), *affine, eps, momentum, out, mean, rstd, running_mean, running_var
        )
        ctx.save_for_backward(input, scale, weight, bias, mean, rstd)
        ctx.input_bias = input_bias  # not saved: no gradient depends on its value, which may change before backward
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With z the input, mu its column mean, u = s z and rstd that of u: ``dz = g s rstd (dy - mean(dy) -
        (z - mu) (s rstd)^2 mean(dy (z - mu)))``, ``dg = s rstd A``, ``db = sum(dy)`` and, since u's own mean and
        variance move with s, ``ds = g eps rstd^3 A``, where A = sum(dy (z - mu)); a bias of z has ``sum(dz)``."""
        input, scale, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            formula = lambda z, c, s, w, b: reference.scale_batch_norm(  # noqa: E731
                z, s, None, None, w, b, True, 0.0, ctx.eps, c
            )
            tensors = (input, ctx.input_bias, scale, weight, bias)
            return *reference_gradients(formula, tensors, grad), None, None, None, None
        rows = input.shape[0]
        dy = grad.float()
        centred = input.float() - mean
        gain = rstd if scale is None else rstd * scale.float().reshape(-1)
        gamma = 1.0 if weight is None else weight.float()
        a, b = (dy * centred).sum(0), dy.sum(0)
        dx = centred.mul_(-gain * gain * a / rows).add_(dy).sub_(b / rows).mul_(gain * gamma)
        ds = None
        if scale is not None and ctx.needs_input_grad[2]:
            ds = _reduce_to(gamma * ctx.eps * rstd**3 * a, scale)
        dw = None if weight is None else (gain * a).to(weight.dtype)
        db = None if bias is None else b.to(bias.dtype)
        dx = dx.to(input.dtype)
        return dx, dx.sum(0) if ctx.needs_input_grad[1] else None, ds, dw, db, None, None, None, None


def _reduce_to(grad: Tensor, scale: Tensor) -> Tensor:
    """Sum a (C,) gradient to the shape of a scale that was broadcast to (C,)."""
    return (grad if scale.numel() == grad.numel() else grad.sum()).reshape(scale.shape).to(scale.dtype)


def fold_scale_batch_norm(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The weight (C, K) and bias (C,) of the one Linear that equals Linear -> * scale -> BatchNorm in eval, computed
    in float32 or better and rounded once. Not differentiable. The formula is ``reference.fold_scale_batch_norm``'s.
    """
    tensors = (linear_weight, linear_bias, scale, running_mean, running_var, weight, bias)
    with torch.no_grad():
        if not native_serves(*tensors):
            return reference.fold_scale_batch_norm(*tensors, eps)  # type: ignore[arg-type]
        dense = linear_weight.contiguous()
        folded = torch.empty_like(dense)
        folded_bias = dense.new_empty(dense.shape[0])
        per_channel = None if scale is None else scale.reshape(-1).expand(dense.shape[0]).contiguous()
        torch.ops.normswap.fold_linear.default(
            dense, linear_bias, per_channel, running_mean, running_var, weight, bias, eps, folded, folded_bias
        )
        return folded, folded_bias
