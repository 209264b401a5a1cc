"""Root-mean-square normalisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    MAX_DIM_BACKWARD,
    affine_dtypes_fit,
    by_kernels,
    dense,
    direct,
    has_rows,
    native_op,
    native_serves,
    needs_grad,
    recording,
    reference_gradients,
    row_statistics,
    statistic_along,
)
from normswap.ops.options import Options, activation_of, gradients, summed, with_sum

FLOAT32_EPS = torch.finfo(torch.float32).eps
"""What PyTorch takes for an eps of None."""


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
    if residual is None and scale is None and shift is None and activation.name == "none":
        epsilon = FLOAT32_EPS if eps is None else eps
        op = direct("rms_norm", input, weight)
        if op is not None and has_rows(input, normalized_shape, weight):
            out = op(input, len(normalized_shape), weight, epsilon, weight_offset, cast_before_weight)
            if out is not None:
                return out
        return _rms_norm(input, normalized_shape, weight, eps, weight_offset, cast_before_weight)
    options = Options(residual, scale, shift, activation)
    return _rms_norm_with_options(input, normalized_shape, weight, eps, weight_offset, cast_before_weight, options)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
) -> Tensor:
    """What the native op that does all of a call declines."""
    if _is_widened(input):
        input, weight = input.float(), None if weight is None else weight.float()
    epsilon = FLOAT32_EPS if eps is None else eps
    shape = tuple(normalized_shape)
    if not _is_served(input, shape, weight):
        return reference.rms_norm(
            input, shape, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight
        )
    if needs_grad(input, weight):
        return _RMSNorm.apply(input, len(shape), weight, epsilon, weight_offset, cast_before_weight, True)
    return _rms_norm_forward(input, weight, shape, epsilon, weight_offset, cast_before_weight, None)


def _is_widened(input: Tensor) -> bool:
    """Whether PyTorch's op gives float32 of 16 bits, as autocast makes it do from some version on."""
    lowered = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda")
    return lowered and not torch.compiler.is_compiling() and _autocast_widens()


@functools.cache
def _autocast_widens() -> bool:
    with torch.autocast("cuda", torch.bfloat16):
        x = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
        return torch.nn.functional.rms_norm(x, (1,)).dtype is torch.float32


def _is_served(input: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> bool:
    return (
        native_serves(input, weight, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and affine_dtypes_fit(input, weight, None)
        and input.numel() > 0
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


@recording("rms_norm")
class _RMSNorm(torch.autograd.Function):
    """``served``: the caller has found that the kernels can take these tensors. Otherwise None where they cannot."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        dims: int,
        weight: Any,
        eps: float,
        weight_offset: float,
        cast_before_weight: bool,
        served: bool = False,
    ) -> Tensor | None:
        order = (weight_offset, cast_before_weight)
        out, statistics = native_op("rms_norm_recorded")(input, dims, weight, eps, *order)
        if out is None and not served:
            return None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            statistics = row_statistics(input, dims, 1)
            out = _rms_norm_forward(input, weight, tuple(input.shape[-dims:]), eps, *order, statistics)
        ctx.save_for_backward(input, weight, statistics)
        ctx.dims, ctx.eps, ctx.order = dims, eps, order
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, statistics = ctx.saved_tensors
        of_input, _, of_weight, *_ = ctx.needs_input_grad
        shape, (weight_offset, cast_before_weight) = input.shape[-ctx.dims :], ctx.order
        if by_kernels(grad):
            dx, dw, _ = native_op("rms_norm_backward")(
                *(grad, input, weight, statistics, None, math.prod(shape), weight_offset, cast_before_weight),
                *(0, 0.0, 0.0, of_input, of_weight, 0),
            )
            if dx is not None or dw is not None:
                return dx, None, dw, None, None, None, None
        order = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
        tensors = input, weight, None, None
        dx, dw, *_ = rms_norm_gradients(tensors, shape, ctx.eps, order, (0, 0.0, 0.0), grad, None)
        return dx, None, dw, None, None, None, None


def rms_norm_directly(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
    options: Options,
) -> Any:
    """By the native op that does all of a call; None where it declines."""
    residual, scale, shift, (name, low, high) = options
    op: Any = direct("rms_norm_with_options", input, weight, residual, scale, shift)
    code = CODES.get(name)
    if op is None or code is None or not has_rows(input, normalized_shape, weight):
        return None
    behind, epsilon = (residual, scale, shift, code, low, high), FLOAT32_EPS if eps is None else eps
    out, total = op(input, len(normalized_shape), weight, epsilon, weight_offset, cast_before_weight, *behind)
    return None if out is None else with_sum(out, total)


def _rms_norm_with_options(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
    options: Options,
) -> Any:
    found = rms_norm_directly(input, normalized_shape, weight, eps, weight_offset, cast_before_weight, options)
    if found is not None:
        return found
    shape = tuple(normalized_shape)
    epsilon = FLOAT32_EPS if eps is None else eps
    options.check("rms_norm", input, len(shape))
    order: dict[str, Any] = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
    served = (
        _is_served(input, shape, weight)
        and options.are_served(input)
        and not torch.is_autocast_enabled("cuda")  # what that makes of a norm and of a scale is PyTorch's to say
    )
    learns = needs_grad(input, weight, *options[:3])
    if served and learns:
        arguments = (weight, epsilon, weight_offset, cast_before_weight)
        return with_sum(*_RMSNormWithOptions.apply(input, len(shape), *arguments, *options.arguments(), True))
    total = None if learns else summed(input, options.residual)
    if total is not None:
        return rms_norm(total, shape, weight, eps, **order, **options._replace(residual=None).keywords()), total
    if not served:
        return reference.rms_norm(input, shape, weight, eps, **order, **options.keywords())
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


@recording("rms_norm_with_options")
class _RMSNormWithOptions(torch.autograd.Function):
    """Output and sum, the latter None without a residual. ``served``: the caller has found that the kernels can take
    these tensors. Otherwise None twice where they cannot."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        dims: int,
        weight: Any,
        eps: float,
        weight_offset: float,
        cast_before_weight: bool,
        residual: Any,
        scale: Any,
        shift: Any,
        activation: int,
        low: float,
        high: float,
        served: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        order = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
        apart = summed(input, residual) if served else None
        if apart is not None:  # here and not outside, for its gradient to be added before it is rounded
            input, residual = apart, None
        out, total, statistics = native_op("rms_norm_with_options_recorded")(
            *(input.contiguous() if served else input, dims, weight, eps, weight_offset, cast_before_weight),
            *(residual, scale, shift, activation, low, high),
        )
        if out is None and not served:
            return None, None
        if out is None:  # a layout to copy, or too large for the memory: that is PyTorch's to say
            shape, statistics = tuple(input.shape[-dims:]), row_statistics(input, dims, 1)
            options = Options(residual, scale, shift, activation_of(activation, low, high))
            out, total = _rms_norm_with_options_forward(input, weight, shape, eps, order, options, statistics)
        total = apart if total is None else total
        ctx.save_for_backward(input if total is None else total, weight, scale, shift, statistics)
        ctx.dims, ctx.eps, ctx.order, ctx.activation = dims, eps, order, (activation, low, high)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> Any:
        *tensors, statistics = ctx.saved_tensors
        of_input, _, of_weight, _, _, _, of_residual, *_ = ctx.needs_input_grad
        input, weight, scale, _ = tensors
        shape = input.shape[-ctx.dims :]
        found: list[Tensor | None] = [None] * 3
        if grad is not None and scale is None and by_kernels(grad, grad_sum):
            found = native_op("rms_norm_backward")(
                *(grad, input, weight, statistics, grad_sum, math.prod(shape), *ctx.order.values()),
                *(*ctx.activation, of_input or of_residual, of_weight, 0),
            )
        if all(one is None for one in found):
            found = rms_norm_gradients(tensors, shape, ctx.eps, ctx.order, ctx.activation, grad, grad_sum)
            dx, dw, dscale, dshift = found
        else:
            dx, dw, dscale = found
            dshift = None
        residual = dx if of_residual else None
        return dx if of_input else None, None, dw, None, None, None, residual, dscale, dshift, *(None,) * 4


def rms_norm_gradients(
    tensors: Sequence[Tensor | None],
    shape: Sequence[int],
    eps: float,
    order: Mapping[str, Any],
    activation: tuple[int, float, float],
    grad: Tensor | None,
    grad_sum: Tensor | None,
) -> list[Tensor | None]:
    """Of what is normalised, weight, scale and shift by the reference formula; it can be differentiated again."""
    act = activation_of(*activation)

    def formula(x: Tensor, w: Any, scale: Any, shift: Any) -> Tensor:
        return reference.rms_norm(x, shape, w, eps, **order, scale=scale, shift=shift, activation=act)

    return gradients(formula, tuple(tensors), grad, grad_sum)


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
        if not by_kernels(grad) or x.shape[ctx.dim] > MAX_DIM_BACKWARD:
            formula = lambda x, w: reference.rms_norm_dim(x, ctx.dim, w, ctx.eps)  # noqa: E731
            return *reference_gradients(formula, (x, weight), grad), None, None
        x, grad_x = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        torch.ops.normswap.rms_norm_dim_backward.default(
            grad.contiguous(), x, dense(weight), rstd, ctx.dim, grad_x, grad_weight
        )
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None, None
