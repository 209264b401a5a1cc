"""Layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import (
    DTYPES,
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    has_rows,
    mixed,
    native_serves,
    needs_grad,
    reference_gradients,
    row_statistic,
)
from normswap.ops.options import Options, gradients, with_sum


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
    """Layer normalisation over the trailing ``normalized_shape`` (Ba et al. 2016), as ``torch.nn.functional``'s.

    ``input`` is (*, *normalized_shape); ``weight`` and ``bias`` have ``normalized_shape`` and the input's dtype or
    float32. Statistics are float32 or better and two-pass. Returns a contiguous tensor of the input's shape and dtype
    (float32 under autocast). Raises what PyTorch's op raises.

    With a ``residual``, like the input, ``input + residual`` as rounded to its dtype is normalised, and returned too:
    (output, sum). With ``scale`` and ``shift`` the norm becomes ``norm * (1 + scale) + shift``, rounded once; they have
    the input's rank, dtype or float32, its first size or 1, and 1 for every other dim that is not normalised. The
    ``activation`` comes last. ValueError is raised where these do not fit.
    """
    if residual is None and scale is None and shift is None and activation.name == "none":
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    options = Options(residual, scale, shift, activation)
    return _layer_norm_with_options(input, normalized_shape, weight, bias, eps, options)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    op = direct("layer_norm", input, weight, bias)
    if op is not None and has_rows(input, normalized_shape, weight):
        out = op(input, len(normalized_shape), weight, bias, eps)
        if out is not None:
            return out
    if input.dtype is not torch.float32 and torch.is_autocast_enabled("cuda"):
        found = _layer_norm_directly(input, normalized_shape, weight, bias, eps, Options())
        if found is not None:
            return found
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape)
    if not _is_served(input, shape, weight, bias):
        return reference.layer_norm(input, shape, weight, bias, eps)
    if needs_grad(input, weight, bias):
        return _LayerNorm.apply(input, weight, bias, shape, eps)
    return _layer_norm_forward(input, weight, bias, shape, eps, None, None)


def _is_served(input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> bool:
    return (
        native_serves(input, weight, bias, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and affine_dtypes_fit(input, weight, bias)
    )


def _layer_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.layer_norm.default(input, dense(weight), dense(bias), math.prod(shape), eps, out, mean, rstd, 0)
    return out


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, shape: tuple[int, ...], eps: float) -> Tensor:
        mean, rstd = row_statistic(input, len(shape)), row_statistic(input, len(shape))
        out = _layer_norm_forward(input, weight, bias, shape, eps, mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or mixed(input, weight, bias):
            formula = lambda x, w, b: reference.layer_norm(x, list(ctx.shape), w, b, ctx.eps)  # noqa: E731
            return *reference_gradients(formula, (input, weight, bias), grad), None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        grads = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), mean, rstd, weight, bias, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None


def _layer_norm_directly(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
) -> Any:
    """By the native op that does all of a call, which under autocast reads 16 bits and writes float32; None where it
    declines."""
    op: Any = direct("layer_norm_with_options", input, weight, bias, *options[:3], autocast=True)
    if op is None or not has_rows(input, normalized_shape, weight):
        return None
    wide = torch.is_autocast_enabled("cuda")
    out, total = op(input, len(normalized_shape), weight, bias, eps, *options.arguments(), wide)
    return None if out is None else with_sum(out, total)


def _layer_norm_with_options(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
) -> Any:
    found = _layer_norm_directly(input, normalized_shape, weight, bias, eps, options)
    if found is not None:
        return found
    shape = tuple(normalized_shape)
    options.check("layer_norm", input, len(shape))
    residual = options.residual
    lowered = input.dtype in DTYPES and input.is_cuda and torch.is_autocast_enabled("cuda")
    if residual is not None and (lowered or not (input.is_contiguous() and residual.is_contiguous())):
        total = input + residual  # laid out as PyTorch does it
        return layer_norm(total, shape, weight, bias, eps, **options._replace(residual=None).keywords()), total
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    if not (_is_served(input, shape, weight, bias) and options.are_served(input)):
        return reference.layer_norm(input, shape, weight, bias, eps, **options.keywords())
    if needs_grad(input, weight, bias, *options[:3]):
        return _LayerNormWithOptions.apply(input, weight, bias, *options[:3], shape, eps, options.activation)
    return with_sum(*_layer_norm_with_options_forward(input, weight, bias, shape, eps, options, None, None))


def _layer_norm_with_options_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    options: Options,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    input = input.contiguous()
    out, total = torch.empty_like(input), None if options.residual is None else torch.empty_like(input)
    torch.ops.normswap.layer_norm_with_options.default(
        *(input, len(shape), dense(weight), dense(bias), eps, *options.densely().arguments(), out, total, mean, rstd, 0)
    )
    return out, total


class _LayerNormWithOptions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Any,
        bias: Any,
        residual: Any,
        scale: Any,
        shift: Any,
        shape: tuple[int, ...],
        eps: float,
        activation: Activation,
    ) -> Any:
        options = Options(residual, scale, shift, activation)
        mean, rstd = row_statistic(input, len(shape)), row_statistic(input, len(shape))
        out, total = _layer_norm_with_options_forward(input, weight, bias, shape, eps, options, mean, rstd)
        ctx.save_for_backward(input if total is None else total, weight, bias, scale, shift, mean, rstd)
        ctx.shape, ctx.eps, ctx.activation = shape, eps, activation
        ctx.set_materialize_grads(False)
        return with_sum(out, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        tensors = ctx.saved_tensors[:5]

        def formula(x: Tensor, w: Any, b: Any, scale: Any, shift: Any) -> Tensor:
            return reference.layer_norm(
                x, ctx.shape, w, b, ctx.eps, scale=scale, shift=shift, activation=ctx.activation
            )

        found = gradients(formula, tensors, grad, grad_sum)
        dx, dw, db, dscale, dshift = found
        return dx, dw, db, dx if ctx.needs_input_grad[3] else None, dscale, dshift, None, None, None
