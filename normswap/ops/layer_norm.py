"""Layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    DTYPES,
    affine_dtypes_fit,
    autocast_to_float,
    by_kernels,
    dense,
    direct,
    has_rows,
    native_op,
    native_serves,
    needs_grad,
    recording,
    row_statistics,
)
from normswap.ops.options import ROUNDED_FIRST, Options, activation_of, gradients, summed, with_sum


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
    dtype: torch.dtype | None = None,
) -> Any:
    """Layer normalisation over the trailing ``normalized_shape`` (Ba et al. 2016), as ``torch.nn.functional``'s.

    ``input`` is (*, *normalized_shape); ``weight`` and ``bias`` have ``normalized_shape`` and the input's dtype or
    float32. Statistics are float32 or better and two-pass. Returns a contiguous tensor of the input's shape and dtype
    (float32 under autocast), or that rounded to ``dtype``. Raises what PyTorch's op raises.

    With a ``residual``, like the input, ``input + residual`` as rounded to its dtype is normalised, and returned too:
    (output, sum). With ``scale`` and ``shift`` the norm becomes ``norm * (1 + scale) + shift``, rounded once; they have
    the input's rank, dtype or float32, its first size or 1, and 1 for every other dim that is not normalised. The
    ``activation`` comes last. ValueError is raised where these do not fit.
    """
    plain = residual is None and scale is None and shift is None and activation.name == "none"
    if plain and dtype is None:
        op = direct("layer_norm", input, weight, bias, autocast=input.dtype is torch.float32)
        if op is not None and has_rows(input, normalized_shape, weight):
            out = op(input, len(normalized_shape), weight, bias, eps)
            if out is not None:
                return out
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    options = Options(residual, scale, shift, activation)
    if dtype is not None:
        return _layer_norm_as(dtype, input, normalized_shape, weight, bias, eps, options, plain)
    return _layer_norm_with_options(input, normalized_shape, weight, bias, eps, options)


def _layer_norm_as(
    dtype: torch.dtype,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
    plain: bool,
) -> Any:
    """The result rounded to ``dtype``, at once where that is the input's and autocast would make it float32."""
    found = None
    if input.dtype is dtype and plain:
        op = direct("layer_norm", input, weight, bias, autocast=True)
        if op is not None and has_rows(input, normalized_shape, weight):
            found = op(input, len(normalized_shape), weight, bias, eps)
    elif input.dtype is dtype and options.activation.name in ROUNDED_FIRST:
        found = layer_norm_directly(input, normalized_shape, weight, bias, eps, options, False)
    if found is None:
        found = layer_norm(input, normalized_shape, weight, bias, eps, **options.keywords())
    return found.to(dtype) if options.residual is None else (found[0].to(dtype), found[1])


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """What the native op that does all of a call declines."""
    if input.dtype is not torch.float32 and torch.is_autocast_enabled("cuda"):
        found = layer_norm_directly(input, normalized_shape, weight, bias, eps, Options(), True)
        if found is not None:
            return found
    input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape)
    if not _is_served(input, shape, weight, bias):
        return reference.layer_norm(input, shape, weight, bias, eps)
    if needs_grad(input, weight, bias):
        return _LayerNorm.apply(input, len(shape), weight, bias, eps, True)
    return _layer_norm_forward(input, weight, bias, shape, eps, None, None)


def _is_served(input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> bool:
    return (
        native_serves(input, weight, bias, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and affine_dtypes_fit(input, weight, bias)
        and input.numel() > 0
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


@recording("layer_norm")
class _LayerNorm(torch.autograd.Function):
    """``served``: the caller has found that the kernels can take these tensors. Otherwise None where they cannot."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dims: int, weight: Any, bias: Any, eps: float, served: bool = False
    ) -> Tensor | None:
        out, statistics = native_op("layer_norm_recorded")(input, dims, weight, bias, eps)
        if out is None and not served:
            return None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            shape, statistics = tuple(input.shape[-dims:]), row_statistics(input, dims, 2)
            out = _layer_norm_forward(input, weight, bias, shape, eps, statistics[0], statistics[1])
        ctx.save_for_backward(input, weight, bias, statistics)
        ctx.dims, ctx.eps = dims, eps
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, statistics = ctx.saved_tensors
        of_input, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        shape = input.shape[-ctx.dims :]
        if by_kernels(grad):
            dx, dw, db = native_op("layer_norm_backward")(
                *(grad, input, weight, bias, statistics, None, math.prod(shape)),
                *(0, 0.0, 0.0, of_input, of_weight, of_bias, 0),
            )
            if dx is not None or dw is not None or db is not None:
                return dx, None, dw, db, None, None
        found = layer_norm_gradients((input, weight, bias, None, None), shape, ctx.eps, (0, 0.0, 0.0), grad, None)
        dx, dw, db, *_ = found
        return dx, None, dw, db, None, None


def layer_norm_directly(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
    wide: bool,
) -> Any:
    """By the native op that does all of a call, ``wide`` of 16 bits a float32 output; None where it declines."""
    residual, scale, shift, (name, low, high) = options
    op: Any = direct("layer_norm_with_options", input, weight, bias, residual, scale, shift, autocast=True)
    code, dims = CODES.get(name), len(normalized_shape)
    if op is None or code is None or not has_rows(input, normalized_shape, weight):
        return None
    out, total = op(input, dims, weight, bias, eps, residual, scale, shift, code, low, high, wide)
    return None if out is None else with_sum(out, total)


def _layer_norm_with_options(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
) -> Any:
    wide = torch.is_autocast_enabled("cuda")
    found = layer_norm_directly(input, normalized_shape, weight, bias, eps, options, wide)
    if found is not None:
        return found
    shape = tuple(normalized_shape)
    options.check("layer_norm", input, len(shape))
    lowered = wide and input.is_cuda and input.dtype in DTYPES and options.residual is not None
    if not lowered:
        input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    served = _is_served(input, shape, weight, bias) and options.are_served(input)
    learns = needs_grad(input, weight, bias, *options[:3])
    if served and learns:
        found = _LayerNormWithOptions.apply(input, len(shape), weight, bias, eps, *options.arguments(), lowered, True)
        return with_sum(*found)
    total = None if learns else summed(input, options.residual, always=lowered)
    if total is not None:
        return layer_norm(total, shape, weight, bias, eps, **options._replace(residual=None).keywords()), total
    if not served:
        return reference.layer_norm(input, shape, weight, bias, eps, **options.keywords())
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


@recording("layer_norm_with_options")
class _LayerNormWithOptions(torch.autograd.Function):
    """Output and sum, the latter None without a residual. ``wide``: of 16 bits a float32 output. ``served``: the caller
    has found that the kernels can take these tensors. Otherwise None twice where they cannot."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        dims: int,
        weight: Any,
        bias: Any,
        eps: float,
        residual: Any,
        scale: Any,
        shift: Any,
        activation: int,
        low: float,
        high: float,
        wide: bool,
        served: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        apart = summed(input, residual, always=wide) if served else None
        if apart is not None:  # here and not outside, for its gradient to be added before it is rounded
            input, residual = apart, None
        behind = (scale, shift, activation, low, high)
        out, total, statistics = native_op("layer_norm_with_options_recorded")(
            input.contiguous() if served else input, dims, weight, bias, eps, residual, *behind, wide
        )
        if out is None and not served:
            return None, None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            shape, statistics = tuple(input.shape[-dims:]), row_statistics(input, dims, 2)
            given = (input, weight, bias, scale, shift)
            cast: Any = autocast_to_float(*given) if wide else given
            x, w, b, gain, offset = cast
            options = Options(residual, gain, offset, activation_of(activation, low, high))
            out, total = _layer_norm_with_options_forward(x, w, b, shape, eps, options, statistics[0], statistics[1])
        total = apart if total is None else total
        ctx.save_for_backward(input if total is None else total, weight, bias, scale, shift, statistics)
        ctx.dims, ctx.eps, ctx.activation = dims, eps, (activation, low, high)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> Any:
        *tensors, statistics = ctx.saved_tensors
        of_input, _, of_weight, of_bias, _, of_residual, *_ = ctx.needs_input_grad
        input, weight, bias, scale, _ = tensors
        shape = input.shape[-ctx.dims :]
        found: list[Tensor | None] = [None] * 3
        if grad is not None and scale is None and by_kernels(grad, grad_sum):
            found = native_op("layer_norm_backward")(
                *(grad, input, weight, bias, statistics, grad_sum, math.prod(shape)),
                *(*ctx.activation, of_input or of_residual, of_weight, of_bias, 0),
            )
        if all(one is None for one in found):
            found = layer_norm_gradients(tensors, shape, ctx.eps, ctx.activation, grad, grad_sum)
        dx, dw, db, dscale, dshift = (*found, None, None)[:5]
        residual = dx if of_residual else None
        return dx if of_input else None, None, dw, db, None, residual, dscale, dshift, *(None,) * 5


def layer_norm_gradients(
    tensors: Sequence[Tensor | None],
    shape: Sequence[int],
    eps: float,
    activation: tuple[int, float, float],
    grad: Tensor | None,
    grad_sum: Tensor | None,
) -> list[Tensor | None]:
    """Of what is normalised, weight, bias, scale and shift by the reference formula; it can be differentiated again."""
    act = activation_of(*activation)

    def formula(x: Tensor, w: Any, b: Any, scale: Any, shift: Any) -> Tensor:
        return reference.layer_norm(x, shape, w, b, eps, scale=scale, shift=shift, activation=act)

    return gradients(formula, tuple(tensors), grad, grad_sum)
