"""What the nodes of C++ call where the kernels do not serve: the formulas of ``ops`` as an op of PyTorch's dispatcher.
They can be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from normswap.ops.batch_norm import formula_gradients as batch_norm_gradients
from normswap.ops.dispatch import by_kernels, given_bias
from normswap.ops.group_norm import formula_gradients, kernel_gradients
from normswap.ops.layer_norm import layer_norm_gradients
from normswap.ops.rms_norm import rms_norm_gradients

_Tensors: TypeAlias = "Sequence[Tensor | None]"
_Formula: TypeAlias = "Callable[[_Tensors, _Tensors, Sequence[float], Sequence[bool]], _Tensors]"


LEARNING = 7
"""The tensors that may learn (kLearning)."""


def norm_formula(
    name: str, grads: _Tensors, tensors: _Tensors, numbers: Sequence[float], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight, bias, residual, scale, shift and the input's bias, whether ``wanted`` or not, of
    the native op of this name; ``tensors`` and ``numbers`` as nodes.cpp lists them."""
    found = _FORMULAS[name.removesuffix("_with_options")](grads, tensors, numbers, wanted)
    return (*found, *(None,) * (LEARNING - len(found)))


def _layer_norm(grads: _Tensors, tensors: _Tensors, numbers: Sequence[float], wanted: Sequence[bool]) -> _Tensors:
    input, weight, bias, _, scale, shift, *_ = tensors
    dims, eps, _, _, _, code, low, high = numbers
    assert input is not None
    dx, dw, db, dscale, dshift = layer_norm_gradients(
        (input, weight, bias, scale, shift), input.shape[-int(dims) :], eps, (int(code), low, high), *_both(grads)
    )
    return dx, dw, db, dx, dscale, dshift


def _rms_norm(grads: _Tensors, tensors: _Tensors, numbers: Sequence[float], wanted: Sequence[bool]) -> _Tensors:
    input, weight, _, _, scale, shift, *_ = tensors
    dims, eps, offset, cast, _, code, low, high = numbers
    assert input is not None
    order = {"weight_offset": offset, "cast_before_weight": bool(cast)}
    shape, activation = input.shape[-int(dims) :], (int(code), low, high)
    dx, dw, dscale, dshift = rms_norm_gradients(
        (input, weight, scale, shift), shape, eps, order, activation, *_both(grads)
    )
    return dx, dw, None, dx, dscale, dshift


def _both(grads: _Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Of the output, and of the sum where there is one."""
    return grads[0], grads[1] if len(grads) > 1 else None


def _group_norm(grads: _Tensors, tensors: _Tensors, numbers: Sequence[float], wanted: Sequence[bool]) -> _Tensors:
    input, weight, bias, residual, *_, statistics, _ = tensors
    groups, eps, *_, code, low, high = numbers
    (grad,) = grads
    assert input is not None and statistics is not None and grad is not None
    given, activation = (input, weight, bias, residual), (int(code), low, high)
    if by_kernels(grad):
        given = input, weight, given_bias(weight, bias, activation[0]), residual
        return kernel_gradients(given, statistics, int(groups), activation, grad, wanted[:4])
    return formula_gradients(given, int(groups), eps, activation, grad)


def _batch_norm(grads: _Tensors, tensors: _Tensors, numbers: Sequence[float], wanted: Sequence[bool]) -> _Tensors:
    input, weight, bias, residual, scale, _, input_bias, mean, var, _, signs = tensors
    _, eps, _, _, training, *activation = numbers
    (grad,) = grads
    assert input is not None and grad is not None
    frozen, (code, low, high) = (mean, var), activation
    given = input, weight, bias, residual, scale, input_bias
    found = batch_norm_gradients(given, frozen, signs, bool(training), eps, (int(code), low, high), grad)
    return *found[:5], None, found[5]


_FORMULAS: Mapping[str, _Formula] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}


@functools.cache
def register() -> torch.library.Library:
    """Declare it, once."""
    library = torch.library.Library("normswap", "FRAGMENT")
    library.define(
        "norm_formula(str name, Tensor?[] grads, Tensor?[] tensors, float[] numbers, bool[] wanted) -> "
        f"({', '.join(['Tensor?'] * LEARNING)})"
    )
    library.impl("norm_formula", norm_formula, "CompositeImplicitAutograd")
    return library
