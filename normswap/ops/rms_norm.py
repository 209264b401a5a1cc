"""Root-mean-square normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import (
    MAX_DIM_BACKWARD,
    affine_dtypes_fit,
    dense,
    direct,
    has_rows,
    mixed,
    native_serves,
    needs_grad,
    reference_gradients,
    row_statistic,
    statistic_along,
)
from normswap.ops.options import Options, gradients, with_sum


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
    """Root-mean-square normalisation over the trailing ``normalized_shape`` (Zhang & Sennrich 2019), as
    ``torch.nn.functional.rms_norm``, times ``weight_offset + weight``.

    ``weight`` has ``normalized_shape`` and the input's dtype or float32; ``weight_offset`` is added to it in float32
    (Gemma's ``1 + weight``). With ``cast_before_weight`` what is normalised is rounded to the input's dtype before the
    weight, as Llama does. ``eps=None`` means the machine epsilon PyTorch takes. Returns a tensor of the input's shape
    and dtype, contiguous for a contiguous input. Raises what PyTorch's op raises.

    ``residual``, ``scale``, ``shift`` and ``activation`` are those of ``layer_norm``: with a residual (output, sum) is
    returned.
    """
    arguments = (weight_offset, cast_before_weight)
    if residual is None and scale is None and shift is None and activation.name == "none":
        return _rms_norm(input, normalized_shape, weight, eps, *arguments)
    options = Options(residual, scale, shift, activation)
    return _rms_norm_with_options(input, normalized_shape, weight, eps, *arguments, options)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
) -> Tensor:
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    op = direct("rms_norm", input, weight)
    if op is not None and has_rows(input, normalized_shape, weight):
        out = op(input, len(normalized_shape), weight, epsilon, weight_offset, cast_before_weight)
        if out is not None:
            return out
    shape = tuple(normalized_shape)
    if not _is_served(input, shape, weight):
        return reference.rms_norm(
            input, shape, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight
        )
    if needs_grad(input, weight):
        return _RMSNorm.apply(input, weight, shape, epsilon, weight_offset, cast_before_weight)
    return _rms_norm_forward(input, weight, shape, epsilon, weight_offset, cast_before_weight, None)


def _is_served(input: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> bool:
    return (
        native_serves(input, weight, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and affine_dtypes_fit(input, weight, None)
    )


def _rms_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    weight_offset: float,
    cast_before_weight: bool,
    rstd: Tensor | None,
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.rms_norm.default(
        input, dense(weight), math.prod(shape), eps, weight_offset, cast_before_weight, out, rstd, 0
    )
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Any,
        shape: tuple[int, ...],
        eps: float,
        weight_offset: float,
        cast_before_weight: bool,
    ) -> Tensor:
        rstd = row_statistic(input, len(shape))
        out = _rms_norm_forward(input, weight, shape, eps, weight_offset, cast_before_weight, rstd)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        ctx.weight_offset, ctx.cast_before_weight = weight_offset, cast_before_weight
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        rounds = ctx.weight_offset and input.dtype is not torch.float32  # PyTorch's op would take a rounded sum
        if torch.is_grad_enabled() or rounds or mixed(input, weight):
            order = {"weight_offset": ctx.weight_offset, "cast_before_weight": ctx.cast_before_weight}
            formula = lambda x, w: reference.rms_norm(x, ctx.shape, w, ctx.eps, **order)  # noqa: E731
            return *reference_gradients(formula, (input, weight), grad), None, None, None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:2]]
        factor = weight + ctx.weight_offset if weight is not None and ctx.weight_offset else weight
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), rstd, factor, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None, None, None


def _rms_norm_with_options(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
    options: Options,
) -> Any:
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    op: Any = direct("rms_norm_with_options", input, weight, *options[:3])
    if op is not None and has_rows(input, normalized_shape, weight):
        arguments = (weight, epsilon, weight_offset, cast_before_weight)
        out, total = op(input, len(normalized_shape), *arguments, *options.arguments())
        if out is not None:
            return with_sum(out, total)
    shape = tuple(normalized_shape)
    options.check("rms_norm", input, len(shape))
    order: dict[str, Any] = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
    residual = options.residual
    if residual is not None and not (input.is_contiguous() and residual.is_contiguous()):
        total = input + residual  # laid out as PyTorch does it
        return rms_norm(total, shape, weight, eps, **order, **options._replace(residual=None).keywords()), total
    if not (
        _is_served(input, shape, weight)
        and options.are_served(input)
        and not torch.is_autocast_enabled("cuda")  # what that makes of a norm and of a scale is PyTorch's to say
    ):
        return reference.rms_norm(input, shape, weight, eps, **order, **options.keywords())
    if needs_grad(input, weight, *options[:3]):
        return _RMSNormWithOptions.apply(input, weight, *options[:3], shape, epsilon, order, options.activation)
    return with_sum(*_rms_norm_with_options_forward(input, weight, shape, epsilon, order, options, None))


def _rms_norm_with_options_forward(
    input: Tensor,
    weight: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    order: dict[str, Any],
    options: Options,
    rstd: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    input = input.contiguous()
    out, total = torch.empty_like(input), None if options.residual is None else torch.empty_like(input)
    torch.ops.normswap.rms_norm_with_options.default(
        *(input, len(shape), dense(weight), eps, *order.values(), *options.densely().arguments(), out, total, rstd, 0)
    )
    return out, total


class _RMSNormWithOptions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Any,
        residual: Any,
        scale: Any,
        shift: Any,
        shape: tuple[int, ...],
        eps: float,
        order: dict[str, Any],
        activation: Activation,
    ) -> Any:
        rstd = row_statistic(input, len(shape))
        options = Options(residual, scale, shift, activation)
        out, total = _rms_norm_with_options_forward(input, weight, shape, eps, order, options, rstd)
        ctx.save_for_backward(input if total is None else total, weight, scale, shift, rstd)
        ctx.shape, ctx.eps, ctx.order, ctx.activation = shape, eps, order, activation
        ctx.set_materialize_grads(False)
        return with_sum(out, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        def formula(x: Tensor, w: Any, scale: Any, shift: Any) -> Tensor:
            return reference.rms_norm(
                x, ctx.shape, w, ctx.eps, **ctx.order, scale=scale, shift=shift, activation=ctx.activation
            )

        dx, dw, dscale, dshift = gradients(formula, ctx.saved_tensors[:4], grad, grad_sum)
        return dx, dw, dx if ctx.needs_input_grad[2] else None, dscale, dshift, None, None, None, None


def rms_norm_dim(x: Tensor, dim: int, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / torch.sqrt(torch.mean(x**2, dim=dim, keepdim=True) + eps)`` in float32 or better, times ``weight``: an
    RMSNorm over channels where ``dim`` is 1.

    ``weight`` is a vector, one value per index along ``dim``, of any floating dtype. Returns a tensor of the shape and
    dtype of ``x``, contiguous for a contiguous ``x``. Raises TypeError for an ``x`` that is not floating-point,
    ValueError for a weight of another shape, IndexError for a ``dim`` out of range.
    """
    if not x.is_floating_point():
        raise TypeError(f"rms_norm_dim: x must be floating-point, got {x.dtype}")
    if weight is not None and weight.shape != (x.shape[dim],):
        raise ValueError(
            f"rms_norm_dim: weight must have shape ({x.shape[dim]},), one value per index along dim {dim} of x "
            f"{tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    if not (native_serves(x, weight) and -x.dim() <= dim < x.dim() and x.shape[dim] > 0):
        return reference.rms_norm_dim(x, dim, weight, eps)
    dim %= x.dim()
    if dim == x.dim() - 1 and affine_dtypes_fit(x, weight, None):
        return rms_norm(x, x.shape[-1:], weight, eps)
    if needs_grad(x, weight):
        return _RMSNormDim.apply(x, weight, dim, eps)
    return _rms_norm_dim_forward(x, weight, dim, eps, None)


def _rms_norm_dim_forward(x: Tensor, weight: Tensor | None, dim: int, eps: float, rstd: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops.normswap.rms_norm_dim.default(x, dense(weight), dim, eps, out, rstd)
    return out


class _RMSNormDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, dim: int, eps: float) -> Tensor:
        rstd = statistic_along(x, dim)
        out = _rms_norm_dim_forward(x, weight, dim, eps, rstd)
        ctx.save_for_backward(x, weight, rstd)
        ctx.dim, ctx.eps = dim, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or x.shape[ctx.dim] > MAX_DIM_BACKWARD:
            formula = lambda x, w: reference.rms_norm_dim(x, ctx.dim, w, ctx.eps)  # noqa: E731
            return *reference_gradients(formula, (x, weight), grad), None, None
        x, grad_x = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        torch.ops.normswap.rms_norm_dim_backward.default(
            grad.contiguous(), x, dense(weight), rstd, ctx.dim, grad_x, grad_weight
        )
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None, None
