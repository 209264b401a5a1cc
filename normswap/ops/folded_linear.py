"""Linear -> scale -> BatchNorm with fixed statistics, as one Linear whose weight is folded anew on every call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import needs_grad, reference_gradients
from normswap.ops.scale_batch_norm import fold_scale_batch_norm


def folded_linear(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``batch_norm(linear(input) * scale)`` in eval for ``input`` (N, K): one matmul and O(K C) besides.

    ``linear_weight`` is (C, K), ``scale`` None or of shape (), (1,), (C,) or (1, C), the other vectors (C,). Nothing is
    kept from call to call. Differentiable any number of times in all but the statistics. Worth it where N > K.
    """
    tensors = (input, linear_weight, linear_bias, scale, weight, bias)
    if needs_grad(*tensors):
        return _FoldedLinear.apply(*tensors, running_mean, running_var, eps)
    folded = fold_scale_batch_norm(linear_weight, linear_bias, scale, running_mean, running_var, weight, bias, eps)
    return F.linear(input, *folded)


class _FoldedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Any,
        scale: Any,
        weight: Any,
        bias: Any,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
    ) -> Tensor:
        folded, shift = fold_scale_batch_norm(
            linear_weight, linear_bias, scale, running_mean, running_var, weight, bias, eps
        )
        kept = folded if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(input, linear_weight, linear_bias, scale, weight, bias, running_mean, running_var, kept)
        ctx.eps = eps
        return F.linear(input, folded, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With t = weight rstd, a = t s, W' = a W and b' = a b + bias - t mean: ``dx = dy W'``, ``dW = a dW'`` and
        ``da = sum(dW' W) + b db'``, where dW' = dy^T x and db' = sum(dy); then ``ds = t da`` and ``dt = s da - mean
        db'``. Vectors are float32."""
        *tensors, mean, var, folded = ctx.saved_tensors
        x, linear_weight, linear_bias, scale, weight, _ = tensors
        if torch.is_grad_enabled():
            formula = lambda x, w, b, s, g, beta: reference.scale_batch_norm(  # noqa: E731
                F.linear(x, w, b), s, mean.float(), var.float(), g, beta, False, 0.0, ctx.eps
            )
            return *reference_gradients(formula, tensors, grad), None, None, None
        needs = ctx.needs_input_grad
        rstd = (var.float() + ctx.eps).rsqrt()
        gain = rstd if weight is None else rstd * weight.float()
        factor = torch.ones_like(rstd) if scale is None else scale.float().reshape(-1).expand_as(rstd)
        shift = grad.sum(0, dtype=torch.float32)
        product = (grad.t() @ x).float() if needs[1] or needs[3] or needs[4] else None
        found: list[Tensor | None] = [grad @ folded if needs[0] else None]
        found.append(product * (gain * factor)[:, None] if product is not None and needs[1] else None)
        found.append(gain * factor * shift)
        column = torch.zeros_like(rstd) if product is None else (product * linear_weight.float()).sum(1)
        if linear_bias is not None:
            column = column + linear_bias.float() * shift
        found.append(None if scale is None else _summed_to(gain * column, scale))
        found.append(rstd * (factor * column - mean.float() * shift))
        found.append(shift)
        wanted = (
            g.to(t.dtype) if g is not None and t is not None and n else None
            for g, t, n in zip(found, tensors, needs, strict=False)
        )
        return *wanted, None, None, None


def _summed_to(grad: Tensor, scale: Tensor) -> Tensor:
    """Sum a (C,) gradient to the shape of a scale that was broadcast to (C,)."""
    return (grad if scale.numel() == grad.numel() else grad.sum()).reshape(scale.shape)
