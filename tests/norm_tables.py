"""Layouts, values and shapes that the tests of tests/cases.py's cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import torch
from models import L1, Projection
from norm_models import drawn
from torch import Tensor, nn

# --- layouts --------------------------------------------------------------------------------------------------------


def _every_other(x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2].copy_(x)


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _rows_of_a_wider_one(x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)[..., 2:-1].copy_(x)


def _misaligned(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every_other": _every_other,
    "transposed": _transposed,
    "rows_of_a_wider_one": _rows_of_a_wider_one,
    "misaligned": _misaligned,
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded_scalar": lambda x: x.reshape(-1)[0].expand(x.shape),
    "contiguous": lambda x: x,
}


def drawn_view(random: Random, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A view of 1 to 5 dims of a larger tensor: permuted, sliced with steps, shifted, expanded, in any combination."""
    torch.manual_seed(random.getrandbits(32))
    shape = [random.choice((1, 2, 3, 4, 8, 17)) for _ in range(random.randint(1, 5))]
    order = random.sample(range(len(shape)), len(shape))
    steps = [random.choice((1, 1, 2)) for _ in shape]
    shifts = [random.choice((0, 0, 1)) for _ in shape]
    storage = [shape[d] * steps[d] + shifts[d] for d in order]
    x = drawn(tuple(storage), device, dtype).permute(*(order.index(d) for d in range(len(shape))))
    x = x[tuple(slice(shift, None, step) for shift, step in zip(shifts, steps, strict=True))]
    for dim in range(len(shape)):
        if random.random() < 0.1:
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    return x


# --- tables ---------------------------------------------------------------------------------------------------------

Made = tuple[Callable[[], nn.Module], tuple[int, ...]]


def rows_of(size: int, *lead: int) -> Iterator[Made]:
    """The norms over rows of ``size`` elements, on an input (*lead, size)."""
    yield lambda: nn.LayerNorm(size), (*lead, size)
    yield lambda: nn.RMSNorm(size, eps=1e-6), (*lead, size)
    if len(lead) == 1:
        yield L1, (*lead, size)


EMPTY: tuple[Made, ...] = (*rows_of(8, 0), *rows_of(8, 3, 0), (lambda: nn.GroupNorm(2, 4), (0, 4, 3)))

ONE_ELEMENT: tuple[Made, ...] = (
    *rows_of(1, 5),
    *rows_of(1, 1),
    (lambda: nn.GroupNorm(4, 4), (3, 4)),
    (lambda: nn.GroupNorm(1, 1), (2, 1)),
)

NORMALIZED_SHAPES: tuple[Made, ...] = tuple(
    (lambda cls=cls, dims=dims: cls(dims), (*lead, *dims))
    for cls in (nn.LayerNorm, nn.RMSNorm)
    for dims in ((4,), (3, 4), (2, 3, 4))
    for lead in ((5,), (2, 3), ())  # (): the whole tensor
)

GROUPS: tuple[Made, ...] = tuple(
    (lambda groups=groups: nn.GroupNorm(groups, 6), shape)
    for groups in (1, 2, 6)
    for shape in ((4, 6), (4, 6, 5), (4, 6, 5, 3), (2, 6, 3, 4, 2))
)

BAD_SHAPES: tuple[Made, ...] = (
    (lambda: nn.LayerNorm(12), (5, 11)),
    (lambda: nn.LayerNorm((3, 4)), (4,)),
    (lambda: nn.LayerNorm(12), ()),
    (lambda: nn.RMSNorm(12), (5, 11)),
    (lambda: nn.GroupNorm(2, 6), (4, 5, 3)),
    (lambda: nn.GroupNorm(2, 6), (6,)),
    (lambda: nn.GroupNorm(3, 6), (2, 7, 3)),
    (lambda: Projection(7, 6), (9, 8)),
    (lambda: Projection(7, 6), (7,)),
    (L1, (5,)),
)

ONE_VALUE: tuple[Made, ...] = (
    (lambda: nn.GroupNorm(4, 4), (1, 4)),
    (lambda: nn.GroupNorm(6, 6), (1, 6, 1, 1)),
    (lambda: Projection(7, 6), (1, 7)),
)


def shown(value: object) -> str:
    """An id for a parametrised test."""
    return repr(value()) if callable(value) else "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def offset(mean: float, std: float) -> Callable[[Tensor], Tensor]:
    """Normal numbers of that mean and spread in the place of standard ones."""
    return lambda x: x * std + mean


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"mean_{mean:g}_std_{std:g}": offset(mean, std) for mean in (100.0, 1000.0) for std in (1.0, 1e-3)},
    "zero": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, 3.0),
    "large": lambda x: x * 1e30 if x.dtype is not torch.float16 else x * 1e4,
    "denormal": lambda x: x * 1e-40,
    "tiny": lambda x: x * 1e-30,
}


def with_row(x: Tensor, row: int, values: Tensor | float) -> Tensor:
    """A copy of ``x`` whose sample ``row`` holds ``values``."""
    x = x.clone()
    x[row] = values
    return x
