"""Convolution -> BatchNorm by running statistics -> residual -> activation, with the norm folded into the convolution's
weight and bias anew on every call."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import autograd_only, direct, lowered_to

Norm: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor | None]"
"""Running mean and variance, weight and bias."""
_NOTHING = contextlib.nullcontext()


def convolution_batch_norm_eval(
    input: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
    folding: str = "folded",
    output_padding: Sequence[int] | None = None,
) -> Tensor:
    """``activation(norm(convolution(input)) + residual)`` with the batch normalisation by running statistics in the
    weight and bias of the convolution, of one to three spatial dims: folded in float32 or better, rounded once to the
    weight's dtype, kept from call to call never. Under autocast input and fold are cast as a convolution's there.

    ``folding`` says by what: "fused" is cuDNN's convolution that ends in a ReLU, "scaled" our own, which scales the
    sums, where ``folding_serves`` says so; "folded" a convolution with what stands behind it by PyTorch's ops,
    anywhere, and differentiable. With ``output_padding`` it is a transposed convolution, "folded".
    Raises what PyTorch's ops raise.
    """
    norm = (running_mean, running_var, weight, bias)
    dtype = lowered_to(input)
    if dtype is not None:
        input = input.to(dtype)
    if folding == "scaled":
        own = conv_weight, conv_bias
        if dtype is not None:
            own = conv_weight.to(dtype), None if conv_bias is None else conv_bias.to(dtype)
        op = direct("convolution_batch_norm_eval", input, *own, *norm, residual, autocast=True)
        numbers = *stride, *padding, *dilation, groups
        end = eps, residual, activation.code, activation.low, activation.high
        out = None
        if op is not None:
            with _NOTHING if dtype is None else torch._C._DisableAutocast():  # it declines where autocast has a say
                out = op(input, *own, *numbers, *norm, *end)
        if out is not None:
            return out
    if output_padding is not None:
        rows = reference.by_output(conv_weight, groups).contiguous()
        rows, shift = _folded(rows, conv_bias, norm, eps, dtype)
        folded = torch.empty_like(conv_weight, dtype=rows.dtype).copy_(
            reference.by_output(rows, groups)
        )  # laid out alike
        out = torch.convolution(input, folded, shift, stride, padding, dilation, True, output_padding, groups)
        return activation(out if residual is None else out + residual)
    folded, shift = _folded(conv_weight, conv_bias, norm, eps, dtype)
    if folding == "fused":
        how = stride, padding, dilation, groups
        if residual is None:
            return torch.cudnn_convolution_relu(input, folded, shift, *how)
        return torch.cudnn_convolution_add_relu(input, folded, residual, 1.0, shift, *how)
    out = torch.convolution(input, folded, shift, stride, padding, dilation, False, (0,) * len(stride), groups)
    return activation(out if residual is None else out + residual)


def _folded(
    weight: Tensor, bias: Tensor | None, norm: Norm, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a plain convolution with the norm in them, in their own dtype or, by autocast, ``dtype``."""
    if dtype not in (None, weight.dtype):
        weight = weight.float()  # to round once
    fold = direct("fold_convolution", weight, bias, *norm, autocast=True)
    made: Any = (None, None) if fold is None else fold(weight, bias, *norm, eps)
    made = reference.fold_scale_batch_norm(weight, bias, None, *norm, eps) if made[0] is None else made
    return made if dtype is None else (made[0].to(dtype), made[1].to(dtype))


FUSED = (torch.float16, torch.bfloat16) if (torch.backends.cudnn.version() or 0) >= 90000 else (torch.float16,)
"""What cuDNN fuses."""


def folding_serves(folding: str, input: Tensor, conv_weight: Tensor) -> bool:
    """Whether a way can be had for such tensors now, where its form can. "fused" takes plans that nobody has called
    deterministic, and has no derivative of any kind."""
    if folding == "folded":
        return True
    dtype = lowered_to(input) or input.dtype
    if not input.is_cuda or input.dim() != 4 or input.numel() == 0 or torch.are_deterministic_algorithms_enabled():
        return False
    if folding == "scaled":
        images = (input, conv_weight)
        last = all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
        return last and dtype in (torch.float16, torch.bfloat16)
    cudnn = torch.backends.cudnn
    return dtype in FUSED and cudnn.enabled and not cudnn.deterministic and autograd_only()


def convolved_shape(
    input: Tensor,
    conv_weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    output_padding: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The shape of what the convolution gives, with ``output_padding`` a transposed one."""
    kernel, sizes = conv_weight.shape[2:], input.shape[2:]
    if output_padding is not None:
        how = zip(sizes, kernel, stride, padding, dilation, output_padding, strict=True)
        larger = ((size - 1) * s - 2 * p + d * (k - 1) + more + 1 for size, k, s, p, d, more in how)
        return (input.shape[0], conv_weight.shape[1] * groups, *larger)
    spatial = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    )
    return (input.shape[0], conv_weight.shape[0], *spatial)
