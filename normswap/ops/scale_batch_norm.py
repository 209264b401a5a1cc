"""Scale -> BatchNorm, and its fold into a Linear."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import DTYPES, dense, direct, native_op, native_serves, needs_grad


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
    num_batches_tracked: Tensor | None = None,
    activation: Activation = NONE,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(norm + residual)``, norm and sum rounded to their dtype, of the norm
    ``torch.nn.functional.batch_norm((input + input_bias) * scale, ...)`` for ``input`` (N, C), whose product is not
    stored.

    ``scale`` has shape (), (1,), (C,) or (1, C) and the input's dtype. With ``u = scale * input``, batch mean and
    biased variance of ``u`` come from those of ``input``: ``scale * mean`` and ``scale^2 * var`` (Ioffe & Szegedy
    2015 for the rest). In training the running statistics, where given, are updated as PyTorch does (unbiased
    variance); ``input_bias`` (C,) then enters the running mean alone, since the batch's statistics cancel it in all
    else; where it is not finite, neither is what comes of its column; ``num_batches_tracked`` is counted up. Raises
    what PyTorch's op raises.
    """
    vectors = (running_mean, running_var, weight, bias, input_bias)
    learns = needs_grad(input, scale, weight, bias, residual)
    ends = activation.name != "none" or residual is not None
    if training or learns or ends:  # by BatchNorm's own kernels, which would take other inputs than rows of columns too
        settings = training, momentum, eps, residual, activation.code, activation.low, activation.high
        op = direct("batch_norm", input, scale, *vectors, num_batches_tracked, residual)
        if op is not None and input.dtype in DTYPES and eps > 0 and _are_columns(input, scale, vectors):
            running, affine = (running_mean, running_var, num_batches_tracked), (weight, bias)
            out: Tensor | None = op(input.contiguous(), *running, *affine, *settings, dense(scale), dense(input_bias))
            if out is not None:
                return out
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if not (
        not training
        and not learns
        and not ends
        and input_bias is None
        and running_mean is not None
        and running_var is not None
        and eps > 0
        and native_serves(input, scale, *vectors)
        and not torch.is_autocast_enabled("cuda")
        and _are_columns(input, scale, vectors)
    ):
        return reference.scale_batch_norm(
            *(input, scale, running_mean, running_var, weight, bias, training, momentum, eps, input_bias),
            *(activation, residual),
        )
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.affine.default(
        input, _per_channel(scale, input), *map(dense, (running_mean, running_var, weight, bias)), eps, out
    )
    return out


_Vectors: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]"
"""Running mean and variance, weight, bias, and the input's bias."""


def _are_columns(input: Tensor, scale: Tensor | None, vectors: _Vectors) -> bool:
    """True when the scale and each vector are of whole columns of ``input`` (N, C), which keeps its dtype."""
    if input.dim() != 2 or input.numel() == 0 or not all(v is None or v.shape == input.shape[1:] for v in vectors):
        return False
    of_columns = scale is None or scale.shape in ((), (1,), input.shape[1:], (1, *input.shape[1:]))
    return of_columns and all(t is None or t.dtype is input.dtype for t in (scale, vectors[4]))


def _per_channel(scale: Tensor | None, input: Tensor) -> Tensor | None:
    return None if scale is None else scale.reshape(-1).expand(input.shape[1]).contiguous()


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
    tensors: Any = (linear_weight, linear_bias, scale, running_mean, running_var, weight, bias)
    fold: Any = folded if native_serves(*tensors) else reference.fold_scale_batch_norm
    if not torch.is_grad_enabled():
        return fold(*tensors, eps)  # type: ignore[no-any-return]
    with torch.no_grad():
        return fold(*tensors, eps)  # type: ignore[no-any-return]


def folded(linear_weight: Tensor, linear_bias: Any, scale: Any, *norm: Any) -> tuple[Tensor, Tensor]:
    """``fold_scale_batch_norm`` of tensors that the kernel takes, where no gradient is recorded."""
    *vectors, eps = norm
    rows = linear_weight.contiguous()
    out, out_bias = torch.empty_like(rows), rows.new_empty(rows.shape[0])
    per_channel = None if scale is None else scale.reshape(-1).expand(rows.shape[0]).contiguous()
    native_op("fold_linear")(rows, dense(linear_bias), per_channel, *map(dense, vectors), eps, out, out_bias)
    return out, out_bias


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
    learns = needs_grad(input, linear_weight, linear_bias, scale, weight, bias)
    fold = reference.fold_scale_batch_norm if learns else fold_scale_batch_norm
    weight_and_bias = fold(linear_weight, linear_bias, scale, running_mean, running_var, weight, bias, eps)
    return F.linear(input, *weight_and_bias)
