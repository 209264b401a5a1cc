"""Calls that record a gradient, by autograd Functions: the twin of nodes/nodes.cpp, in its words. It serves where that
is not compiled, and tensors that are to be laid out first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from normswap.activation import CODES
from normswap.ops.dispatch import by_kernels, native_op, needs_grad, recording, reference_gradients

LEARNING = ("input", "weight", "bias", "residual", "scale", "shift", "input_bias")
"""The tensors that may learn (kLearning)."""
TENSORS = (*LEARNING, "running_mean", "running_var")
NUMBERS = ("size", "eps", "weight_offset", "cast_before_weight", "training", "activation", "low", "high")
"""What else a backward may need of a call; ``size``: how many dims rows have, or how many groups there are."""

Tensors: TypeAlias = "Sequence[Tensor | None]"
Numbers: TypeAlias = "Sequence[float]"
Laid: TypeAlias = "Iterator[tuple[Sequence[Any], Tensor | None]]"
"""What a native op was given, laid out as it takes it, and the sum where that was made for it."""


class Norm(NamedTuple):
    """How the gradients of a native op that are wanted, for each of LEARNING, are made from those of the output and of
    the sum, what is saved (TENSORS, the statistics and a ReLU's signs) and NUMBERS: by ``kernels``, or None where they
    have none, or by the ``formula``, which can be differentiated again. A residual's is None where it is not wanted."""

    kernels: Callable[[Tensors, Tensors, Numbers, Sequence[bool]], Tensors | None]
    formula: Callable[[Tensors, Tensors, Numbers, Sequence[bool]], Tensors]
    of_rows: bool


_norms: dict[str, Norm] = {}
_NOTHING = (None,) * len(LEARNING)


def gradients(name: str, grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors:
    """For each of LEARNING, of the native op ``name``."""
    kernels, formula, of_rows = _norms[name]
    grad, grad_sum = grads if len(grads) == 2 else (grads[0], None)
    ends_there = not of_rows and not numbers[5]  # without an activation
    passed = ends_there and wanted[3]  # the gradient of a sum is its summands'
    if passed:
        wanted = (*wanted[:3], False, *wanted[4:])
    weight, bias = saved[1:3]
    found: Tensors | None = None
    if True not in wanted or (grad is None and grad_sum is None):
        found = _NOTHING
    elif by_kernels(grad, grad_sum):
        alike = (saved[0], weight, weight, *saved[3:]) if ends_there and bias is None else saved
        found = kernels((grad, grad_sum), alike, numbers, wanted)
    if found is None:
        found = formula((grad, grad_sum), saved, numbers, wanted)
        if wanted[2] and bias is None and weight is not None and grad is not None:  # not kept
            db = grad.sum([d for d in range(grad.dim()) if d != 1], dtype=torch.float32).to(weight.dtype)
            found = (*found[:2], db, *found[3:])
    return (*found[:3], grad, *found[4:]) if passed else found


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of ``like``, which is dense."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def record(
    name: str,
    arguments: str,
    norm: Norm,
    laid_out: Callable[..., Laid] = lambda *given: iter(()),
    sums: bool = False,
) -> None:
    """Let calls of the native op ``name`` of these ``arguments`` record gradients: ``direct`` then gives its Function,
    which answers None where the kernels do not take the tensors, also as ``laid_out``. ``sums``: the op also returns
    the sum of input and residual, which ``laid_out`` may have added itself."""
    names, op = arguments.split(), f"{name}_recorded"
    absent, unwanted = (*(0 if name in NUMBERS else None for name in names), None, 0), (False,) * (len(names) + 1)
    places = {argument: place for place, argument in enumerate(names)}
    tensors_of = itemgetter(*(places.get(tensor, -2) for tensor in TENSORS))
    numbers_of = itemgetter(*(places.get(number, -1) for number in NUMBERS))
    wanted_of = itemgetter(*(places.get(tensor, -1) for tensor in LEARNING))
    found_of = itemgetter(*(LEARNING.index(each) if each in LEARNING else -1 for each in names))
    _norms[name] = norm

    def forward(ctx: Any, *given: Any) -> Any:
        wanted = wanted_of(ctx.needs_input_grad + unwanted[len(ctx.needs_input_grad) :])
        passes = not norm.of_rows and True not in (*wanted[:3], *wanted[4:])  # to what is added behind the norm
        if passes and numbers_of(given + absent[len(given) :])[5]:
            return None  # PyTorch's ops keep the sum or the activation alone, no input of the norm
        native, total = native_op(op), None
        made = native(*given)
        if made[0] is None:
            for others, total in laid_out(*given):  # noqa: B007 (the last is that of what was made)
                made = native(*others)
                if made[0] is not None:
                    break
            else:
                return (None, None) if sums else None
        given += absent[len(given) :]
        input, weight, bias, residual, scale, shift, input_bias, mean, var = tensors_of(given)
        ctx.numbers = numbers = numbers_of(given)
        training, activation = numbers[4:6]
        ctx.strides, ctx.input_bias = None, None
        if passes:
            ctx.save_for_backward(*(None,) * 11)  # the gradient goes on as it comes
            return made[0]
        if sums:
            total = made[1] if total is None else total
            input = input if total is None else total
            ctx.set_materialize_grads(False)
        statistics, signs = made[1 + sums], made[2] if len(made) > 2 + sums else None
        if norm.of_rows:
            residual = None
        else:
            bias = bias if activation or weight is None else None  # the weight says what its gradient is like
            residual = _savable(residual) if activation and signs is None else None
            if residual is not None and activation == CODES["relu"]:
                residual = made[0]
        if scale is not None:
            scale, shift = _savable(scale), _savable(shift)
        if training:
            mean = var = None
        if signs is not None:  # they lie in the input's memory, which hooks may save in another layout
            ctx.strides = input.stride()
        ctx.save_for_backward(input, weight, bias, residual, scale, shift, None, mean, var, statistics, signs)
        ctx.input_bias = input_bias  # not saved: no gradient depends on its value, which may change before backward
        return (made[0], total) if sums else made[0]

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved, needs, shift = ctx.saved_tensors, ctx.needs_input_grad, ctx.input_bias
        if shift is not None:
            saved = (*saved[:6], shift, *saved[7:])
        if ctx.strides is not None and saved[0].stride() != ctx.strides:
            saved = (saved[0].new_empty_strided(saved[0].shape, ctx.strides).copy_(saved[0]), *saved[1:])
        wanted = wanted_of(needs + unwanted[len(needs) :])
        return found_of((*gradients(name, grads, saved, ctx.numbers, wanted), None))[: len(needs)]

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    title = "".join(map(str.capitalize, name.split("_")))
    recording(name)(type(f"_{title}", (torch.autograd.Function,), body))


def _savable(tensor: Tensor | None) -> Tensor | None:
    """``tensor``, which PyTorch does not save but what it was added to: it may be an inference tensor."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def differentiable(
    compute: Callable[..., tuple[Any, ...]],
    kernels: Callable[..., Tensors | None],
    formula: Callable[..., Tensor],
    *tensors: Tensor | None,
) -> Tensor:
    """What ``compute(learns, *tensors)`` gives first; behind it are the statistics where a gradient is to be recorded.
    The gradients of ``tensors`` are what ``kernels(wanted, grad, *tensors, *statistics)`` gives, or the formula's."""
    if needs_grad(*tensors):
        return _Differentiable.apply(compute, kernels, formula, *tensors)  # type: ignore[no-any-return]
    return compute(False, *tensors)[0]  # type: ignore[no-any-return]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, kernels: Any, formula: Any, *tensors: Tensor | None) -> Tensor:
        out, *statistics = compute(True, *tensors)
        ctx.save_for_backward(*tensors, *statistics)
        ctx.kernels, ctx.formula = kernels, formula
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, _, _, *wanted = ctx.needs_input_grad
        found = ctx.kernels(wanted, grad, *ctx.saved_tensors) if by_kernels(grad) else None
        if found is None:
            found = reference_gradients(ctx.formula, ctx.saved_tensors[: len(wanted)], grad)
        return None, None, None, *found
