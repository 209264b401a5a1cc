"""Code that casts, run in float64 as if it were run in the dtypes that it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.in_float64 import Lifted, lift

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.rand(3, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) + 1


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


# What a function of x gives, x being of this dtype, in the dtype it says it gives.
CASES: list[tuple[Callable[[Tensor], Any], torch.dtype, Callable[[Tensor], Tensor], torch.dtype]] = [
    (lambda x: x, HALF, lambda x: x, HALF),
    (lambda x: x * 3, HALF, lambda x: x * 3, HALF),
    (lambda x: x.float() * 3, HALF, lambda x: x * 3, FLOAT),
    (lambda x: (x.float() / 3).to(x.dtype), HALF, lambda x: x / 3, HALF),  # the result of the whole is not rounded
    (lambda x: (x.float() / 3).to(x.dtype) * 5, HALF, lambda x: rounded(x / 3, HALF) * 5, HALF),
    (lambda x: (x.float() / 3).type_as(x) * 5, BFLOAT, lambda x: rounded(x / 3, BFLOAT) * 5, BFLOAT),
    (lambda x: (x.float() / 3).to(dtype=x.dtype).T, HALF, lambda x: rounded(x / 3, HALF).T, HALF),
    (lambda x: (x.float() / 3).half().float() * 5, HALF, lambda x: rounded(x / 3, HALF) * 5, FLOAT),
    (lambda x: (x / 3).bfloat16() * 1, HALF, lambda x: rounded(x / 3, BFLOAT), BFLOAT),  # has fewer bits
    (lambda x: (x / 3e9).half() * 1, BFLOAT, lambda x: rounded(x / 3e9, HALF), HALF),  # has fewer exponents
    (lambda x: (x / 3).float() * 1, BFLOAT, lambda x: x / 3, FLOAT),
    (lambda x: (x / 3).to(x.device) * 1, HALF, lambda x: x / 3, HALF),
    (lambda x: (x * 9).half().to(torch.int64), FLOAT, lambda x: rounded(x * 9, HALF).long(), torch.int64),
    (lambda x: (x > 1.5).nonzero(), HALF, lambda x: (x > 1.5).nonzero(), torch.int64),
    (lambda x: torch.arange(3).float() * 1, HALF, lambda x: torch.arange(3).float(), FLOAT),
    (lambda x: torch.sum(x / 3, dim=-1, dtype=FLOAT), HALF, lambda x: (x / 3).sum(-1), FLOAT),
    (lambda x: x.shape[0] + x.double() * 1, HALF, lambda x: 3 + x, DOUBLE),
]


@pytest.mark.parametrize(("function", "dtype", "expected", "says"), CASES)
def test_what_is_rounded_and_what_dtype_it_says(
    function: Callable[[Tensor], Any], dtype: torch.dtype, expected: Callable[[Tensor], Tensor], says: torch.dtype
) -> None:
    x = X.clone()
    with Lifted({x: dtype}):
        found = function(x)
        assert found.dtype is says
    assert torch.equal(found, expected(X)) and found.dtype is expected(X).dtype


def test_gradients_are_not_rounded() -> None:
    x = X.clone().requires_grad_()
    with Lifted({x: HALF}):
        out = (x.float() / 3).half() * 5
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, torch.full_like(X, 5) / 3)  # type: ignore[arg-type]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5,), 1 / 3, dtype=DOUBLE))
        self.register_buffer("shift", torch.ones(5, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        assert (self.weight.dtype, self.shift.dtype) == (HALF, FLOAT)  # type: ignore[union-attr]
        return (x.float() * self.weight + self.shift).to(x.dtype)


def test_a_norm_and_its_tensors_are_of_the_dtypes_given() -> None:
    norm, x = Scaled(), X.clone()
    lift(norm, BFLOAT, {"weight": HALF, "shift": FLOAT})
    out = norm(x)
    assert torch.equal(out, x * norm.weight + 1) and out is not x
