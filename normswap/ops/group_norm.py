"""Group normalisation, contiguous and channels_last, and instance normalisation by the statistics of the input: as many
groups as channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, NONE, ROUNDED_FIRST, Activation
from normswap.ops.dispatch import (
    LARGE_GROUP,
    affine_dtypes_fit,
    dense,
    direct,
    native_op,
    native_serves,
    needs_grad,
    recorded,
    reference_gradients,
)
from normswap.ops.recorded import Laid, Norm, Numbers, Tensors, laid_out_as, record


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the group normalisation of ``input`` (N, C, *) (Wu & He 2018), as
    ``torch.nn.functional.group_norm``: the norm is rounded to its dtype, then the sum.

    ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. A channels_last input gives a channels_last
    output; any other a contiguous one. Returns the input's shape and dtype (float32 under autocast), or that rounded to
    ``dtype``. Raises what PyTorch's ops raise, and ValueError for an activation that is not in
    ``normswap.activation``.
    """
    if activation.name not in CODES:
        raise ValueError(
            f"group_norm: activation must be one of {', '.join(map(repr, CODES))}, got {activation.name!r}"
        )
    wide = torch.is_autocast_enabled("cuda") and input.dtype is not torch.float32
    if dtype is not None:
        if not (wide and dtype is input.dtype and residual is None and activation.name in ROUNDED_FIRST):
            return group_norm(input, num_groups, weight, bias, eps, activation, residual=residual).to(dtype)
        wide = False
    op = direct("group_norm", input, weight, bias, residual, autocast=True)
    if op is not None:
        out = op(input, num_groups, weight, bias, eps, activation.code, activation.low, activation.high, residual, wide)
        if out is not None:
            return out
    if _is_served(input, num_groups, weight, bias, residual):
        result, added = torch.float32 if wide else input.dtype, residual
        if residual is not None and residual.dtype != result:
            if not wide and result != torch.float32:  # the sum has a wider dtype than the norm
                return activation(group_norm(input, num_groups, weight, bias, eps) + residual)
            added = residual.float()
        found = native_group_norm(input, weight, bias, num_groups, eps, activation, added, result)
        if found is not None:
            return found
    out = reference.group_norm(input, num_groups, weight, bias, eps, activation, residual=residual)
    return out if dtype is None else out.to(dtype)


def instance_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the instance normalisation of ``input`` (N, C, *) (Ulyanov et al.
    2016), as ``torch.nn.functional.instance_norm`` without running statistics.

    ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. A channels_last input gives a channels_last
    output; any other a contiguous one. Returns the input's shape and dtype, also under autocast. Raises what PyTorch's
    ops raise.
    """
    shape = input.shape
    if len(shape) >= 3 and input.numel() > shape[0] * shape[1]:  # of one value a row PyTorch raises ValueError
        channels = shape[1]
        op = direct("group_norm", input, weight, bias, residual)
        if op is not None:
            numbers = activation.code, activation.low, activation.high
            out = op(input, channels, weight, bias, eps, *numbers, residual, False)
            if out is not None:
                return out
        alike = residual is None or residual.dtype == input.dtype
        if alike and _is_served(input, channels, weight, bias, residual):
            found = native_group_norm(input, weight, bias, channels, eps, activation, residual, input.dtype)
            if found is not None:
                return found
    return reference.instance_norm(input, weight, bias, eps, activation, residual=residual)


def _is_served(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> bool:
    """True when the kernels take these, of a residual whatever its dtype."""
    group = input.numel() // max(1, input.shape[0] * num_groups) if input.dim() >= 2 else 0
    return (
        native_serves(input, weight, bias, residual, elements=group, least=LARGE_GROUP)
        and input.dim() >= 2
        and num_groups > 0
        and input.shape[1] > 0
        and input.shape[1] % num_groups == 0
        and input.numel() != num_groups  # one value per group: PyTorch raises ValueError
        and (weight is None or weight.shape == input.shape[1:2])
        and (bias is None or bias.shape == input.shape[1:2])
        and (residual is None or residual.shape == input.shape)
        and affine_dtypes_fit(input, weight, bias)
    )


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    activation: Activation,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """``group_norm`` by our kernel, differentiable where that is asked for, of tensors that it takes: ``dtype``, that
    of the result and the residual, is the input's or float32. None where no gradient can be recorded."""
    numbers = activation.code, activation.low, activation.high
    if needs_grad(input, weight, bias, residual):
        wide = dtype is not input.dtype
        return recorded("group_norm")(input, num_groups, weight, bias, eps, *numbers, residual, wide)
    layout = _layout_of(input)
    input = input.contiguous(memory_format=layout)
    if residual is not None:
        residual = residual.contiguous(memory_format=layout)
    out = torch.empty_like(input, dtype=dtype, memory_format=layout)
    last = layout is not torch.contiguous_format
    torch.ops.normswap.group_norm.default(
        *(input, dense(weight), dense(bias), num_groups, eps, last, *numbers, residual, out, None, None, 0)
    )
    return out


def _layout_of(input: Tensor) -> torch.memory_format:
    """The channels_last format of ``input`` if it has one and is not also contiguous, else contiguous_format."""
    if input.is_contiguous():
        return torch.contiguous_format
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if wanted is None or not input.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    return wanted


def _laid_out(
    input: Tensor, groups: int, weight: Any, bias: Any, eps: float, code: int, low: float, high: float, *behind: Any
) -> Laid:
    residual, wide = behind
    input = input.contiguous(memory_format=_layout_of(input))
    added = None if residual is None else laid_out_as(residual, input)
    yield (input, groups, dense(weight), dense(bias), eps, code, low, high, added, wide), None


def _by_kernels(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors | None:
    (grad, _), (input, weight, bias, residual, *_, statistics, _) = grads, saved
    groups, *_, code, low, high = numbers
    assert input is not None and grad is not None
    input = input.contiguous(memory_format=_layout_of(input))
    added = None if residual is None else laid_out_as(residual, input)
    found = native_op("group_norm_backward_or_none")(
        *(laid_out_as(grad, input), input, dense(weight), dense(bias), added, statistics),
        *(int(groups), int(code), low, high, *wanted[:4]),
    )
    return None if all(one is None for one in found) else (*found, None, None, None)


def _by_formula(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors:
    """In the place of a residual before a ReLU is what that gave."""
    (grad, _), (input, weight, bias, residual, *_) = grads, saved
    groups, eps, *_, code, low, high = numbers
    act, passed = Activation.of(int(code), low, high), None
    assert grad is not None
    if act.name == "relu" and residual is not None:
        grad = passed = torch.where(residual <= 0, 0.0, grad)
        act, residual = NONE, None

    def formula(x: Tensor, w: Tensor | None, b: Tensor | None, r: Tensor | None) -> Tensor:
        return reference.group_norm(x, int(groups), w, b, eps, act, residual=r)

    dx, dw, db, dr = reference_gradients(formula, (input, weight, bias, residual), grad)
    return dx, dw, db, dr if passed is None else passed, None, None, None


record(
    "group_norm",
    "input size weight bias eps activation low high residual wide",
    Norm(_by_kernels, _by_formula, of_rows=False),
    _laid_out,
)
