"""What the nodes of C++ call where the kernels do not serve: the formulas of ``ops`` as ops of PyTorch's dispatcher.
They can be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from normswap.ops.group_norm import formula_gradients, kernel_gradients
from normswap.ops.layer_norm import layer_norm_gradients
from normswap.ops.rms_norm import rms_norm_gradients

Gradient = Tensor | None


def row_norm_formula(
    grad: Gradient,
    sum_grad: Gradient,
    input: Tensor,
    weight: Gradient,
    bias: Gradient,
    scale: Gradient,
    shift: Gradient,
    numbers: Sequence[float],
) -> tuple[Gradient, ...]:
    """The gradients of input, weight, bias, scale and shift; ``numbers`` as nodes.cpp lists them."""
    kind, dims, eps, offset, cast, code, low, high, _ = numbers
    shape, activation = input.shape[-int(dims) :], (int(code), low, high)
    if kind == 0:
        found = layer_norm_gradients((input, weight, bias, scale, shift), shape, eps, activation, grad, sum_grad)
        return tuple(found)
    order = {"weight_offset": offset, "cast_before_weight": bool(cast)}
    dx, dw, *rest = rms_norm_gradients((input, weight, scale, shift), shape, eps, order, activation, grad, sum_grad)
    return dx, dw, None, *rest


def group_norm_formula(
    grad: Tensor,
    input: Tensor,
    weight: Gradient,
    bias: Gradient,
    residual: Gradient,
    statistics: Tensor,
    numbers: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Gradient, Gradient, Gradient, Gradient]:
    """The gradients that are ``wanted``: of input, weight, bias and residual; ``numbers`` as nodes.cpp lists them."""
    groups, eps, code, low, high, _ = numbers
    tensors, activation = (input, weight, bias, residual), (int(code), low, high)
    if torch.is_grad_enabled():
        dx, dw, db, dr = formula_gradients(tensors, int(groups), eps, activation, grad)
    else:
        dx, dw, db, dr = kernel_gradients(tensors, statistics, int(groups), activation, grad, wanted)
    return dx, dw, db, dr


@functools.cache
def register() -> torch.library.Library:
    """Declare them, once."""
    library = torch.library.Library("normswap", "FRAGMENT")
    both = "Tensor input, Tensor? weight, Tensor? bias"
    library.define(
        f"row_norm_formula(Tensor? grad, Tensor? sum_grad, {both}, Tensor? scale, Tensor? shift, float[] numbers) "
        "-> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)"
    )
    library.define(
        f"group_norm_formula(Tensor grad, {both}, Tensor? residual, Tensor statistics, float[] numbers, bool[] wanted) "
        "-> (Tensor?, Tensor?, Tensor?, Tensor?)"
    )
    for function in (row_norm_formula, group_norm_formula):
        library.impl(function.__name__, function, "CompositeImplicitAutograd")
    return library
