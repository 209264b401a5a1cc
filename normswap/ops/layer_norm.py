"""Layer normalisation, of trailing dims or along any one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, ROUNDED_FIRST, Activation
from normswap.ops.dispatch import (
    DTYPES,
    affine_dtypes_fit,
    autocast_to_float,
    dense,
    direct,
    has_rows,
    in_memory_order,
    native_serves,
)
from normswap.ops.recorded import differentiable
from normswap.ops.rows import Options, computed, is_served, of_the_sum, record_rows, with_sum


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

    With a ``residual``, like the input or of 16 bits beside float32, ``input + residual`` as rounded to the input's
    dtype is normalised, and returned too: (output, sum). With ``scale`` and ``shift`` the norm becomes ``norm * (1 +
    scale) + shift``, rounded once; they have the input's rank, dtype or float32, its first size or 1, and 1 for every
    other dim that is not normalised. The ``activation`` comes last. ValueError is raised where these do not fit.
    """
    plain = residual is None and scale is None and shift is None and activation.name == "none"
    if plain and dtype is None:
        if not isinstance(input, Tensor):
            return F.layer_norm(input, normalized_shape, weight, bias, eps)  # which says so
        if input.is_nested:
            return reference.layer_norm(input, normalized_shape, weight, bias, eps)
        op = direct("layer_norm", input, weight, bias, autocast=input.dtype is torch.float32)
        if op is not None and has_rows(input, normalized_shape, weight):
            out, _ = op(input, len(normalized_shape), weight, bias, eps)
            if out is not None:
                return out
        return _generally(input, normalized_shape, weight, bias, eps)
    options = Options(residual, scale, shift, activation)
    if dtype is not None:
        return _layer_norm_as(dtype, input, normalized_shape, weight, bias, eps, options)
    return _generally(input, normalized_shape, weight, bias, eps, options)


def _layer_norm_as(
    dtype: torch.dtype,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
) -> Any:
    """The result rounded to ``dtype``, at once where the input is float32, or has that and autocast would make it
    float32."""
    found = None
    if input.dtype is dtype and options.activation.name in ROUNDED_FIRST:
        found = layer_norm_directly(input, normalized_shape, weight, bias, eps, options)
    elif input.dtype is torch.float32 and options.only_add() and input.is_contiguous():
        found = layer_norm_directly(input, normalized_shape, weight, bias, eps, options, dtype)
    if found is None:
        found = layer_norm(input, normalized_shape, weight, bias, eps, **options.keywords())
    return found.to(dtype) if options.residual is None else (found[0].to(dtype), found[1])


def layer_norm_directly(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options,
    dtype: torch.dtype | None = None,
) -> Any:
    """By the native op that does all of a call, with an output of ``dtype``; None where it declines."""
    residual, scale, shift, activation = options
    op = direct("layer_norm", input, weight, bias, residual, scale, shift, autocast=True)
    code, dims = CODES.get(activation.name), len(normalized_shape)
    if op is None or code is None or not has_rows(input, normalized_shape, weight):
        return None
    numbers = code, activation.low, activation.high
    out, total = op(input, dims, weight, bias, eps, residual, scale, shift, *numbers, dtype)
    return None if out is None else with_sum(out, total)


def _generally(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: Options | None = None,
) -> Any:
    """What the native op that does all of a call declines."""
    lowers = (options is not None or input.dtype is not torch.float32) and torch.is_autocast_enabled("cuda")
    dtype = torch.float32 if lowers else None
    # In code that torch.compile makes no op does all of a call, and to ask for one would end its graph (torch 2.10).
    if (options is not None or lowers) and not torch.compiler.is_compiling():
        found = layer_norm_directly(input, normalized_shape, weight, bias, eps, options or Options(), dtype)
        if found is not None:
            return found
    shape, wide = tuple(normalized_shape), False
    if options is not None:
        options.check("layer_norm", input, len(shape))
        wide = lowers and input.is_cuda and input.dtype in DTYPES and options.residual is not None
    if input.is_cuda and not wide:
        input, weight, bias = autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    if options is not None:
        again = partial(layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=eps)
        if (both := of_the_sum(again, input, (weight, bias), options, wide)) is not None:
            return both
    if is_served(input, shape, weight, bias) and (options is None or options.are_served(input)):
        found = computed(
            "layer_norm", input, shape, (weight, bias), (eps,), options, (torch.float32 if wide else None,)
        )
        if found is not None:
            return found
    more = {} if options is None else options.keywords()
    return reference.layer_norm(input, shape, weight, bias, eps, **more)


record_rows("layer_norm", "input size weight bias eps", reference.layer_norm, more="dtype")


def layer_norm_dim(
    x: Tensor, dim: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalisation along one ``dim``, such as the channels of an NCHW tensor, without a copy.

    ``weight`` and ``bias`` are vectors, one value per index along ``dim``. Returns the shape and dtype of ``x``
    (float32 under autocast), laid out as elementwise operations give it. Raises TypeError for an ``x`` that is not
    floating-point, IndexError for a ``dim`` out of range, ValueError for a weight or bias of another shape.
    """
    op = direct("layer_norm_dim", x, weight, bias)
    if op is not None:
        out = op(x, dim, weight, bias, eps)
        if out is not None:
            return out
    _check_along(x, dim, weight, bias)
    x, weight, bias = autocast_to_float(x, weight, bias)  # type: ignore[assignment]
    if not (native_serves(x, weight, bias) and 0 not in x.stride() and x.numel() > 0):
        return reference.layer_norm_dim(x, dim, weight, bias, eps)
    return in_memory_order(lambda t, along: _layer_norm_along(t, along, weight, bias, eps), x, dim)


def _check_along(x: Tensor, dim: int, *parameters: Tensor | None) -> None:
    if not x.is_floating_point():
        raise TypeError(f"layer_norm_dim: x must be floating-point, got {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"layer_norm_dim: dim must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    for p in parameters:
        if p is not None and p.shape != (x.shape[dim],):
            raise ValueError(
                f"layer_norm_dim: weight and bias must have shape ({x.shape[dim]},), one value per index along dim "
                f"{dim} of x {tuple(x.shape)}; got {tuple(p.shape)}"
            )


def _layer_norm_along(x: Tensor, dim: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if math.prod(x.shape[dim + 1 :]) == 1 and affine_dtypes_fit(x, weight, bias):  # rows
        return layer_norm(x.flatten(dim), x.shape[dim : dim + 1], weight, bias, eps).view(x.shape)

    def compute(learns: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops.normswap.layer_norm_dim.default(x, dense(weight), dense(bias), dim, eps, out, None, None)
        return (out,)

    formula = lambda x, w, b: reference.layer_norm_dim(x, dim, w, b, eps)  # noqa: E731
    return differentiable(compute, lambda *_: None, formula, x, weight, bias)
