"""Root-mean-square normalisation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    MAX_DIM_BACKWARD,
    affine_dtypes_fit,
    dense,
    direct,
    has_rows,
    native_serves,
    statistic_along,
)
from normswap.ops.recorded import Tensors, differentiable
from normswap.ops.rows import Options, computed, is_served, of_the_sum, record_rows, with_sum

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
        if not isinstance(input, Tensor):
            return F.rms_norm(input, normalized_shape, weight, eps)  # which says so
        epsilon = FLOAT32_EPS if eps is None else eps
        op = direct("rms_norm", input, weight)
        if op is not None and has_rows(input, normalized_shape, weight):
            out, _ = op(input, len(normalized_shape), weight, epsilon, weight_offset, cast_before_weight)
            if out is not None:
                return out
        return _generally(input, normalized_shape, weight, eps, weight_offset, cast_before_weight)
    options = Options(residual, scale, shift, activation)
    return _generally(input, normalized_shape, weight, eps, weight_offset, cast_before_weight, options)


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
    residual, scale, shift, activation = options
    op = direct("rms_norm", input, weight, residual, scale, shift)
    code = CODES.get(activation.name)
    if op is None or code is None or not has_rows(input, normalized_shape, weight):
        return None
    behind, epsilon = (code, activation.low, activation.high), FLOAT32_EPS if eps is None else eps
    how = weight_offset, cast_before_weight, residual, scale, shift
    out, total = op(input, len(normalized_shape), weight, epsilon, *how, *behind)
    return None if out is None else with_sum(out, total)


def _generally(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    cast_before_weight: bool,
    options: Options | None = None,
) -> Any:
    """What the native op that does all of a call declines."""
    shape = tuple(normalized_shape)
    if options is not None:
        found = rms_norm_directly(input, shape, weight, eps, weight_offset, cast_before_weight, options)
        if found is not None:
            return found
        options.check("rms_norm", input, len(shape))
        order: dict[str, Any] = {"weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
        again = functools.partial(rms_norm, normalized_shape=shape, weight=weight, eps=eps, **order)
        if (both := of_the_sum(again, input, (weight,), options)) is not None:
            return both
    elif _is_widened(input):
        input, weight = input.float(), None if weight is None else weight.float()
    # What autocast makes of a norm and of a scale is PyTorch's to say.
    if is_served(input, shape, weight) and (
        options is None or (options.are_served(input) and not torch.is_autocast_enabled("cuda"))
    ):
        numbers = FLOAT32_EPS if eps is None else eps, weight_offset, cast_before_weight
        found = computed("rms_norm", input, shape, (weight,), numbers, options)
        if found is not None:
            return found
    more = {} if options is None else options.keywords()
    return reference.rms_norm(
        input, shape, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight, **more
    )


def _is_widened(input: Tensor) -> bool:
    """Whether PyTorch's op gives float32 of 16 bits, as autocast makes it do from some version on."""
    lowered = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda")
    return lowered and not torch.compiler.is_compiling() and _autocast_widens()


@functools.cache
def _autocast_widens() -> bool:
    with torch.autocast("cuda", torch.bfloat16):
        x = torch.ones(1, 1, dtype=torch.bfloat16, device="cuda")
        return torch.nn.functional.rms_norm(x, (1,)).dtype is torch.float32


record_rows("rms_norm", "input size weight eps weight_offset cast_before_weight", reference.rms_norm)


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

    def compute(learns: bool, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rstd = statistic_along(x, dim) if learns else None
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.ops.normswap.rms_norm_dim.default(x, dense(weight), dim, eps, out, rstd)
        return out, rstd

    def kernels(wanted: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensors | None:
        if x.shape[dim] > MAX_DIM_BACKWARD:
            return None
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dw = torch.empty_like(weight) if wanted[1] and weight is not None else None
        given = grad.contiguous(), x.contiguous(), dense(weight), rstd, dim, dx, dw
        torch.ops.normswap.rms_norm_dim_backward.default(*given)
        return dx if wanted[0] else None, dw

    return differentiable(compute, kernels, lambda x, w: reference.rms_norm_dim(x, dim, w, eps), x, weight)
