"""Norms of rows, ``layer_norm`` and ``rms_norm``: which calls the kernels serve, and what is done of one that no native
op does all of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normswap.ops.dispatch import affine_dtypes_fit, dense, native_serves, needs_grad, recorded
from normswap.ops.options import Options, summed, with_sum
from normswap.ops.recorded import Laid


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


class Rows(NamedTuple):
    """A call that is served, by what the native ops of this ``name`` are given."""

    name: str
    input: Tensor
    shape: tuple[int, ...]
    affine: tuple[Tensor | None, ...]
    numbers: tuple[Any, ...]
    options: Options | None = None
    dtype: tuple[torch.dtype | None, ...] = ()

    def computed(self) -> Any:
        """By the kernels; None where they cannot record a gradient."""
        name, input, shape, affine, numbers, options, dtype = self
        dims, unkept = len(shape), [None for _ in affine]  # the statistics: a mean where there is a bias
        if options is None:
            if needs_grad(input, *affine):
                return recorded(name)(input, dims, *affine, *numbers)
            input = input.contiguous()
            out = torch.empty_like(input)
            op = getattr(torch.ops.normswap, name).default
            op(input, *map(dense, affine), math.prod(shape), *numbers, out, *unkept, 0)
            return out
        if needs_grad(input, *affine, *options[:3]):
            given = input, dims, *affine, *numbers, *options.arguments(), *dtype
            out, total = recorded(f"{name}_with_options")(*given)
            return None if out is None else with_sum(out, total)
        input = input.contiguous()
        out, total = torch.empty_like(input), None if options.residual is None else torch.empty_like(input)
        op = getattr(torch.ops.normswap, f"{name}_with_options").default
        given = input, dims, *map(dense, affine), *numbers, *options.densely().arguments()
        op(*given, out, total, *unkept, 0)
        return with_sum(out, total)


def laid_out(*given: Any) -> Laid:
    """What a native op was given, as it takes it, and no sum."""
    yield [dense(value) if isinstance(value, Tensor) else value for value in given], None


def laid_out_with_options(behind: int) -> Callable[..., Laid]:
    """The same of an op whose options stand behind so many arguments, and the sum where PyTorch is to make it: its
    gradients are then added before they are rounded. What autocast widens is tried in float32, too."""

    def densely(*given: Any) -> Laid:
        first, (residual, scale, shift), last = given[:behind], given[behind : behind + 3], given[behind + 3 :]
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
