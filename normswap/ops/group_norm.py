"""Group normalisation, contiguous and channels_last."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import (
    LARGE_GROUP,
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    native_serves,
    needs_grad,
    reference_gradients,
)


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
    """Group normalisation of ``input`` (N, C, *) (Wu & He 2018), as ``torch.nn.functional.group_norm``, then the
    activation: "none", "relu", "silu", "gelu" or "gelu_tanh", of the norm's output rounded to its dtype.

    ``weight`` and ``bias`` are (C,). A channels_last input gives a channels_last output; any other a contiguous one.
    Returns the input's shape and dtype (float32 under autocast). Raises what PyTorch's op raises, and ValueError for
    another activation.
    """
    if residual is not None or activation.code > 4:
        return reference.group_norm(input, num_groups, weight, bias, eps, activation, residual=residual)
    op = direct("group_norm", input, weight, bias)
    if op is not None:
        out = op(input, num_groups, weight, bias, eps, activation.code)
        if out is not None:
            return out
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    group = math.prod(input.shape[1:]) // max(1, num_groups)
    if not (
        native_serves(input, weight, bias, elements=group, least=LARGE_GROUP)
        and input.dim() >= 2
        and num_groups > 0
        and input.shape[1] > 0
        and input.shape[1] % num_groups == 0
        and input.numel() != num_groups  # one value per group: PyTorch raises ValueError
        and (weight is None or weight.shape == input.shape[1:2])
        and (bias is None or bias.shape == input.shape[1:2])
        and affine_dtypes_fit(input, weight, bias)
    ):
        return reference.group_norm(input, num_groups, weight, bias, eps, activation)
    return native_group_norm(input, weight, bias, num_groups, eps, activation)


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    activation: Activation = NONE,
) -> Tensor:
    """``group_norm`` by our kernel, differentiable where that is asked for, of tensors that it takes."""
    if needs_grad(input, weight, bias):
        return _GroupNorm.apply(input, weight, bias, num_groups, eps, activation)
    return _group_norm_forward(input, weight, bias, num_groups, eps, activation, None, None)


def _channels_last_format(input: Tensor) -> torch.memory_format:
    """The channels_last format of ``input`` if it has one and is not also contiguous, else contiguous_format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(input.dim())
    if wanted is None or input.is_contiguous() or not input.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    return wanted


def _group_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    activation: Activation,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    layout = _channels_last_format(input)
    input = input.contiguous(memory_format=layout)
    out = torch.empty_like(input, memory_format=layout)
    channels_last, code = layout is not torch.contiguous_format, activation.code
    torch.ops.normswap.group_norm.default(
        input, dense(weight), dense(bias), num_groups, eps, channels_last, code, out, mean, rstd, 0
    )
    return out


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, num_groups: int, eps: float, activation: Activation
    ) -> Tensor:
        mean = input.new_empty((input.shape[0], num_groups), dtype=torch.float32)
        rstd = torch.empty_like(mean)
        out = _group_norm_forward(input, weight, bias, num_groups, eps, activation, mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.num_groups, ctx.eps, ctx.activation = num_groups, eps, activation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        num_groups, eps, activation = ctx.num_groups, ctx.eps, ctx.activation
        if torch.is_grad_enabled():
            formula = lambda x, w, b: reference.group_norm(x, num_groups, w, b, eps, activation)  # noqa: E731
            return *reference_gradients(formula, (input, weight, bias), grad), None, None, None
        if activation != NONE:  # what it was given is made again, which costs less than to keep it
            normalised = _group_norm_forward(input, weight, bias, num_groups, eps, NONE, None, None)
            grad = reference.activation_gradient(grad.float(), normalised.float(), activation.name)
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        layout = _channels_last_format(input)
        batch, channels = input.shape[:2]
        # float32 throughout: PyTorch's 16-bit backward wants mean and rstd rounded to 16 bits, which costs accuracy.
        grads = torch.ops.aten.native_group_norm_backward(
            grad.float().contiguous(),
            input.float().contiguous(),
            mean,
            rstd,
            None if weight is None else weight.float(),
            batch,
            channels,
            math.prod(input.shape[2:]),
            num_groups,
            needs,
        )
        dx, dw, db = (g.to(t.dtype) if n else None for g, t, n in zip(grads, (input, weight, bias), needs, strict=True))
        return None if dx is None else dx.contiguous(memory_format=layout), dw, db, None, None, None
