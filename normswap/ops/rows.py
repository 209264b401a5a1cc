"""Norms of rows, ``layer_norm`` and ``rms_norm``: what may stand before and behind one - a residual, an adaptive scale
and shift, an activation - which calls the kernels serve, and what is done of one that no native op does all of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import (
    affine_dtypes_fit,
    dense,
    native_op,
    native_serves,
    needs_grad,
    recorded,
    reference_gradients,
)
from normswap.ops.recorded import Laid, Norm, Numbers, Tensors, record


class Options(NamedTuple):
    """The options of a call of ``layer_norm`` or ``rms_norm``, in the order of the native ops' arguments."""

    residual: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: Activation = NONE

    def only_add(self) -> bool:
        """True with nothing but a residual, or without."""
        return self.scale is None and self.shift is None and self.activation.name == "none"

    def arguments(self) -> tuple[Any, ...]:
        """For the native ops."""
        return *self[:3], self.activation.code, self.activation.low, self.activation.high

    def keywords(self) -> dict[str, Any]:
        """For the functions of ``ops`` and ``reference``."""
        return self._asdict()

    def check(self, op: str, input: Tensor, dims: int) -> None:
        """Raise ValueError where these do not go with rows of the trailing ``dims`` dims of ``input``."""
        if self.activation.name not in CODES:
            names = ", ".join(map(repr, CODES))
            raise ValueError(f"{op}: activation must be one of {names}, got {self.activation.name!r}")
        r = self.residual
        if r is not None and not (r.shape == input.shape and r.device == input.device and can_add(input, r)):
            raise ValueError(
                f"{op}: residual must have the input's shape, dtype (or 16 bits beside float32) and device, "
                f"{tuple(input.shape)}, {input.dtype} and {input.device}; "
                f"got {tuple(r.shape)}, {r.dtype} and {r.device}"
            )
        if (self.scale is None) != (self.shift is None):
            raise ValueError(f"{op}: scale and shift must be given both or neither")
        for name, t in (("scale", self.scale), ("shift", self.shift)):
            if t is not None and not _is_per_sample(t, input, dims):
                raise ValueError(
                    f"{op}: {name} must have the input's rank, its last {dims} dims, its first size or 1, and 1 "
                    f"elsewhere; got {tuple(t.shape)} for an input of {tuple(input.shape)}"
                )

    def are_served(self, input: Tensor) -> bool:
        """True when the kernels take these, which ``check`` passed."""
        given = {t.dtype for t in (self.scale, self.shift) if t is not None}
        return native_serves(input, *self[:3]) and len(given) <= 1 and given <= {input.dtype, torch.float32}

    def densely(self) -> Options:
        """With tensors laid out as the kernels take them."""
        if self.scale is None or self.shift is None:
            return self._replace(residual=dense(self.residual))
        scale, shift = self.scale, self.shift
        if scale.shape != shift.shape:
            scale, shift = (t.contiguous() for t in torch.broadcast_tensors(scale, shift))
        elif scale.stride() != shift.stride() or not scale[:1].is_contiguous():
            scale, shift = scale.contiguous(), shift.contiguous()
        return Options(dense(self.residual), scale, shift, self.activation)


_NO_OPTIONS: tuple[Any, ...] = Options().arguments()
"""Made once: code that torch.compile makes cannot (torch 2.11)."""


def _is_per_sample(t: Tensor, input: Tensor, dims: int) -> bool:
    leading = input.dim() - dims
    return (
        t.dim() == input.dim()
        and t.shape[leading:] == input.shape[leading:]
        and all(size == 1 or (i == 0 and size == input.shape[0]) for i, size in enumerate(t.shape[:leading]))
    )


def can_add(input: Tensor, residual: Tensor) -> bool:
    """True where kernels add the residual, as far as dtypes go: the input's, or 16 bits to float32."""
    dtype = residual.dtype
    return dtype is input.dtype or (input.dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16))


def summed(input: Tensor, residual: Tensor | None, always: bool = False) -> Tensor | None:
    """The sum, laid out as PyTorch does it, where kernels do not take a tensor's layout, or dtypes that differ in rows
    like these, or ``always``; else None."""
    if residual is None:
        return None
    plain = residual.dtype is input.dtype and input.is_contiguous() and residual.is_contiguous()
    return None if plain and not always else input + residual


def with_sum(out: Tensor, total: Tensor | None) -> Any:
    """What an op returns: ``out``, and with a residual the sum too."""
    return out if total is None else (out, total)


def is_served(input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """True when the kernels take rows of this ``shape``."""
    return (
        native_serves(input, weight, bias, elements=math.prod(shape))
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and affine_dtypes_fit(input, weight, bias)
        and input.numel() > 0
    )


def of_the_sum(
    op: Callable[..., Any], input: Tensor, affine: tuple[Tensor | None, ...], options: Options, always: bool = False
) -> tuple[Tensor, Tensor] | None:
    """The ``op`` of the sum, and that, where PyTorch is to make it: kernels do not take a summand's layout, or
    ``always``. None where no sum is asked for, or a gradient is recorded: that is added before it is rounded."""
    total = None if needs_grad(input, *affine, *options[:3]) else summed(input, options.residual, always)
    return None if total is None else (op(total, **options._replace(residual=None).keywords()), total)


def computed(
    name: str,
    input: Tensor,
    shape: tuple[int, ...],
    affine: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    options: Options | None = None,
    dtype: tuple[torch.dtype | None, ...] = (),
) -> Any:
    """A call that is served, by the native ops of this ``name``; None where they cannot record a gradient."""
    dims, behind = len(shape), _NO_OPTIONS if options is None else options.arguments()
    if needs_grad(input, *affine, *behind[:3]):
        out, total = recorded(name)(input, dims, *affine, *numbers, *behind, *dtype)
        return None if out is None else with_sum(out, total)
    input, behind = input.contiguous(), behind if options is None else options.densely().arguments()
    out, total = torch.empty_like(input), None if behind[0] is None else torch.empty_like(input)
    op, unkept = getattr(torch.ops.normswap, name).default, [None for _ in affine]  # a mean where there is a bias
    op(input, dims, *map(dense, affine), *numbers, *behind, out, total, *unkept, 0)
    return with_sum(out, total)


def laid_out(*given: Any) -> Laid:
    """What a native op was given, as it takes it, and no sum."""
    yield [dense(value) if isinstance(value, Tensor) else value for value in given], None


def laid_out_with_options(behind: int) -> Callable[..., Laid]:
    """The same of an op whose options stand behind so many arguments, or are left out, and the sum where PyTorch is to
    make it: its gradients are then added before they are rounded. What autocast widens is tried in float32, too."""

    def densely(*given: Any) -> Laid:
        first, (residual, scale, shift, *last) = given[:behind], given[behind:] or _NO_OPTIONS
        wide = len(last) > 3 and last[3] is torch.float32
        total = summed(first[0], residual, always=wide)
        if total is not None:
            first, residual = (total, *first[1:]), None
        options = Options(residual, scale, shift).densely()
        made = [*next(laid_out(*first))[0], *options[:3], *last]
        yield made, total
        if wide:
            yield [value.float() if isinstance(value, Tensor) else value for value in made], total

    return densely


def record_rows(name: str, arguments: str, formula: Callable[..., Any], *, more: str = "") -> None:
    """Let calls of the native op ``name`` of these ``arguments``, the options and ``more`` record gradients;
    ``formula`` is the reference."""
    backward, has_bias = f"{name}_backward", "bias" in arguments.split()

    def by_kernels(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors | None:
        (grad, grad_sum), (input, weight, bias, _, scale, *_, statistics, _) = grads, saved
        size, _, offset, cast, _, code, low, high = numbers
        if grad is None or scale is not None:
            return None
        assert input is not None
        of_input, of_weight, of_bias, of_residual, *_ = wanted
        cols, last = math.prod(input.shape[-int(size) :]), (int(code), low, high, of_input or of_residual, of_weight)
        if has_bias:
            dx, dw, db = native_op(backward)(grad, input, weight, bias, statistics, grad_sum, cols, *last, of_bias, 0)
        else:
            how = offset, bool(cast)
            dx, dw, db = native_op(backward)(grad, input, weight, statistics, grad_sum, cols, *how, *last, 0)
        residual = dx if of_residual else None
        return None if dx is None and dw is None and db is None else (dx, dw, db, residual, None, None, None)

    def by_formula(grads: Tensors, saved: Tensors, numbers: Numbers, wanted: Sequence[bool]) -> Tensors:
        input, weight, bias, _, scale, shift, *_ = saved
        size, eps, offset, cast, _, code, low, high = numbers
        assert input is not None
        shape, act = input.shape[-int(size) :], Activation.of(int(code), low, high)

        def result(x: Tensor, w: Any, b: Any, scale: Any, shift: Any) -> Tensor:
            own = {"bias": b} if has_bias else {"weight_offset": offset, "cast_before_weight": bool(cast)}
            return formula(x, shape, w, eps=eps, **own, scale=scale, shift=shift, activation=act)  # type: ignore[no-any-return]

        dx, dw, db, dscale, dshift = reference_gradients(result, (input, weight, bias, scale, shift), *grads)
        return dx, dw, db, dx if wanted[3] else None, dscale, dshift, None

    every = f"{arguments} residual scale shift activation low high {more}"
    norm = Norm(by_kernels, by_formula, of_rows=True)
    record(name, every, norm, laid_out_with_options(len(arguments.split())), sums=True)
