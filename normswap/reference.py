"""The plain PyTorch mathematics of every op: the path where our kernels do not run, the differentiable
formula behind double backward, and what the tests compare with.

The function of a name here takes the same arguments as the op of that name in ``ops``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.activation import NONE, Activation


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: Activation = NONE,
) -> Any:
    """PyTorch's layer norm of ``input + residual``, then ``* (1 + scale) + shift``, which is computed in float32 or
    better and rounded once, then the activation; with a residual also the sum."""
    total = input if residual is None else input + residual
    if scale is None or shift is None:
        out = F.layer_norm(total, list(normalized_shape), weight, bias, eps)
    else:
        wide = torch.promote_types(total.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        normalised = F.layer_norm(total.to(wide), list(normalized_shape), weight, bias, eps)
        lowered = total.dtype in (torch.float16, torch.bfloat16) and total.is_cuda and torch.is_autocast_enabled("cuda")
        out = adapted(normalised, scale, shift).to(wide if lowered else total.dtype)
    out = activation(out)
    return out if residual is None else (out, total)


def adapted(normalised: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``normalised * (1 + scale) + shift`` in the dtype of ``normalised``, as adaptive norms (Peebles & Xie 2023)."""
    return normalised * (1 + scale.to(normalised.dtype)) + shift.to(normalised.dtype)


def layer_norm_dim(
    x: Tensor, dim: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm along ``dim`` in float32 or better, with one weight and bias per index along it; its output is float32
    under autocast, as that of PyTorch's layer norm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dim, keepdim=True) + eps)
    if weight is not None:
        out = out * _along(dim, weight, wide)
    if bias is not None:
        out = out + _along(dim, bias, wide)
    return out if x.is_cuda and torch.is_autocast_enabled("cuda") else out.to(x.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """PyTorch's group norm, rounded to its dtype as it is, plus the residual, then the activation."""
    out = F.group_norm(input, num_groups, weight, bias, eps)
    return activation(out if residual is None else out + residual)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """PyTorch's batch norm, rounded as it is, plus the residual, then the activation."""
    out = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return activation(out if residual is None else out + residual)


def instance_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """The same of PyTorch's instance norm by the statistics of ``input``."""
    out = F.instance_norm(input, None, None, weight, bias, eps=eps)
    return activation(out if residual is None else out + residual)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    activation: Activation = NONE,
) -> Any:
    """``input / sqrt(mean(input^2) + eps) * (weight_offset + weight)`` over the trailing ``normalized_shape`` (Zhang &
    Sennrich 2019), in float32 or better; with ``cast_before_weight`` what is normalised is rounded to the input's
    dtype before the weight. The options are those of ``layer_norm``."""
    total = input if residual is None else input + residual
    out = _rms_norm(total, list(normalized_shape), weight, eps, weight_offset, cast_before_weight, scale, shift)
    out = activation(out)
    return out if residual is None else (out, total)


def _rms_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
    scale: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    adapts = scale is not None and shift is not None
    plain = weight is None or not (weight_offset or cast_before_weight) or list(weight.shape) != shape
    if plain and not adapts:
        return F.rms_norm(x, shape, weight, eps)  # one rounding, at the end; a wrong shape raises
    wide = torch.promote_types(x.dtype, torch.float32)
    gain = None if weight is None else weight.to(wide) + weight_offset
    if cast_before_weight:
        out = F.rms_norm(x, shape, None, eps).to(x.dtype).to(wide)
        out = out if gain is None else out * gain
    else:
        out = F.rms_norm(x.to(wide), shape, gain, eps)
    if scale is not None and shift is not None:
        out = adapted(out, scale, shift)
    return out.to(x.dtype)


def rms_norm_dim(x: Tensor, dim: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2, dim) + eps)`` in float32 or better, times ``weight``, one value per index along ``dim``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)
    if weight is not None:
        normalised = normalised * _along(dim, weight, wide)
    return normalised.to(x.dtype)


def _along(dim: int, vector: Tensor, like: Tensor) -> Tensor:
    """``vector`` as ``like`` has it along ``dim``."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return vector.to(like.dtype).view(shape)


def l1_norm(input: Tensor, dim: int = -1, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """``input / mean(|input|)`` along ``dim``; the mean is rounded to the input's dtype, as the expression does, and so
    is what it becomes by ``clamp(min=minimum)`` or ``+ eps``."""
    return input / l1_divisor(torch.mean(torch.abs(input), dim=dim, keepdim=True), eps, minimum)


def l1_divisor(mean: Tensor, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """What ``l1_norm`` divides by, of the means of |input| in its dtype."""
    if minimum is not None:
        mean = mean.clamp(min=minimum)
    return mean + eps if eps else mean


def l2_norm(x: Tensor, dim: int = -1, eps: float = 0.0) -> Tensor:
    """``x / max(norm of x along dim, eps)``: ``torch.nn.functional.normalize``; with ``eps`` 0 the plain division."""
    norm = x.norm(p=2, dim=dim, keepdim=True)
    return x / (norm.clamp_min(eps) if eps else norm)


def frobenius_norm(x: Tensor) -> Tensor:
    """``x / x.norm()`` of the whole tensor."""
    return x / x.norm()


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
    activation: Activation = NONE,
    residual: Tensor | None = None,
) -> Tensor:
    """``batch_norm((input + input_bias) * scale)`` over the rows of ``input`` (N, C) (Ioffe & Szegedy 2015), plus the
    residual, then the activation."""
    norm = running_mean, running_var, weight, bias, training, momentum, eps
    return batch_norm(scaled(input, scale, input_bias), *norm, activation, residual=residual)


def scaled(input: Tensor, scale: Tensor | None, input_bias: Tensor | None) -> Tensor:
    """``(input + input_bias) * scale`` of what is given of these."""
    shifted = input if input_bias is None else input + input_bias
    return shifted if scale is None else shifted * scale


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
    """The weight (C, K) and bias (C,) of the one Linear that equals Linear -> * scale -> BatchNorm in eval; the weight
    (C, K, *) alike of a convolution.

    With ``t = weight / sqrt(running_var + eps)`` and ``a = t scale`` per output channel: ``W' = a W`` and ``b' = a b +
    bias - t running_mean``, in float32 or better, each rounded once to the Linear's dtype.
    """
    wide = torch.promote_types(linear_weight.dtype, torch.float32)
    gain = (running_var.to(wide) + eps).rsqrt()
    if weight is not None:
        gain = gain * weight.to(wide)
    column = gain if scale is None else gain * scale.to(wide).reshape(-1)
    shift = -gain * running_mean.to(wide)
    if bias is not None:
        shift = shift + bias.to(wide)
    if linear_bias is not None:
        shift = shift + column * linear_bias.to(wide)
    column = column.reshape(-1, *(1,) * (linear_weight.dim() - 1))
    return (linear_weight.to(wide) * column).to(linear_weight.dtype), shift.to(linear_weight.dtype)


def by_output(weight: Tensor, groups: int) -> Tensor:
    """The weight (C_in, C_out / groups, *) of a transposed convolution as a plain one has it, (C_out, C_in / groups,
    *), and the reverse."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
