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


def adapted(normalised: Tensor, scale: Tensor | None, shift: Tensor | None, activation: Activation) -> Tensor:
    """``activation(normalised * (1 + scale) + shift)``; the last two are none or both."""
    if scale is not None and shift is not None:
        normalised = normalised * (1 + scale) + shift
    return activation(normalised)


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
    """PyTorch's layer norm of ``input + residual``, then scale, shift and activation; with a residual (result, sum)."""
    total = input if residual is None else input + residual
    out = adapted(F.layer_norm(total, list(normalized_shape), weight, bias, eps), scale, shift, activation)
    return out if residual is None else (out, total)


def layer_norm_dim(
    x: Tensor, dim: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """PyTorch's layer norm over one dim."""
    return F.layer_norm(x.movedim(dim, -1), [x.shape[dim]], weight, bias, eps).movedim(-1, dim)


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
) -> Tensor:
    """``input / sqrt(mean(input^2) + eps) * (weight_offset + weight)`` over the trailing ``normalized_shape`` (Zhang &
    Sennrich 2019), in float32 or better; with ``cast_before_weight`` what is normalised is rounded to the input's
    dtype before the weight."""
    shape = list(normalized_shape)
    if weight is None or list(weight.shape) != shape or not (weight_offset or cast_before_weight):
        return F.rms_norm(input, shape, weight, eps)  # one rounding, at the end; a wrong shape raises
    wide = torch.promote_types(input.dtype, torch.float32)
    gain = weight.to(wide) + weight_offset if weight_offset else weight
    if cast_before_weight:
        return (F.rms_norm(input, shape, None, eps).to(input.dtype) * gain).to(input.dtype)
    return F.rms_norm(input.to(wide), shape, gain, eps).to(input.dtype)


def rms_norm_dim(x: Tensor, dim: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2, dim) + eps)`` in float32 or better, times ``weight``, one value per index along ``dim``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalised = wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + eps)
    if weight is not None:
        shape = [1] * x.dim()
        shape[dim] = -1
        normalised = normalised * weight.to(wide.dtype).view(shape)
    return normalised.to(x.dtype)


def l1_norm(input: Tensor, dim: int = -1, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """``input / mean(|input|)`` along ``dim``; the mean is rounded to the input's dtype, as the expression does, and so
    is what it becomes by ``clamp(min=minimum)`` or ``+ eps``."""
    return input / l1_divisor(torch.mean(torch.abs(input), dim=dim, keepdim=True), eps, minimum)


def l1_divisor(mean: Tensor, eps: float = 0.0, minimum: float | None = None) -> Tensor:
    """What ``l1_norm`` divides by, of the means of |input| in its dtype."""
    if minimum is not None:
        mean = mean.clamp(min=minimum)
    return mean + eps if eps else mean


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
    """``batch_norm((input + input_bias) * scale)`` over the rows of ``input`` (N, C) (Ioffe & Szegedy 2015)."""
    shifted = input if input_bias is None else input + input_bias
    scaled = shifted if scale is None else shifted * scale
    return F.batch_norm(scaled, running_mean, running_var, weight, bias, training, momentum, eps)


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
    """The weight (C, K) and bias (C,) of the one Linear that equals Linear -> * scale -> BatchNorm in eval.

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
    return (linear_weight.to(wide) * column[:, None]).to(linear_weight.dtype), shift.to(linear_weight.dtype)
