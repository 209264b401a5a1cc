"""l2_norm and frobenius_norm without a GPU: formulas, gradients, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import ops
from normswap.ops.l2_norm import gradient

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def values(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((2, 6, 3, 5), (4, 6), (6,), (3, 1, 4), (0, 5)))
def test_l2_norm_is_the_expression(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    for dim in range(-len(shape), len(shape)):
        assert torch.equal(ops.l2_norm(x, dim), x / x.norm(p=2, dim=dim, keepdim=True))
        for eps in (1e-12, 0.5, 3.0):
            assert torch.equal(ops.l2_norm(x, dim, eps), F.normalize(x, dim=dim, eps=eps))
    assert torch.equal(ops.l2_norm(x), ops.l2_norm(x, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((2, 6, 3, 5), (4, 6), (6,), ()))
def test_frobenius_norm_is_the_expression(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    assert torch.equal(ops.frobenius_norm(x), x / torch.norm(x))


@pytest.mark.case("zero-rows")
def test_zeros_are_nan_without_an_eps_and_stay_zeros_with_one() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, -4.0]])
    assert torch.equal(ops.l2_norm(x).isnan(), torch.tensor([[True, True], [False, False]]))
    assert torch.equal(ops.l2_norm(x, eps=1e-12), torch.tensor([[0.0, 0.0], [0.6, -0.8]]))
    assert ops.frobenius_norm(torch.zeros(3)).isnan().all()


@pytest.mark.case("output-strides")
def test_layouts_are_those_of_the_expression() -> None:
    for x in (torch.randn(3, 5).t(), torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)):
        assert ops.l2_norm(x, 1).stride() == (x / x.norm(dim=1, keepdim=True)).stride()
        assert ops.frobenius_norm(x).stride() == (x / x.norm()).stride()


@pytest.mark.case("double-backward", "functorch")
def test_they_are_differentiable() -> None:
    x = values(2, 5, 3).requires_grad_()
    for function in (lambda x: ops.l2_norm(x, 1), lambda x: ops.l2_norm(x, 1, 2.0), ops.frobenius_norm):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))
    over_last = torch.vmap(lambda row: ops.l2_norm(row, 1), in_dims=2, out_dims=2)
    torch.testing.assert_close(over_last(x), ops.l2_norm(x, 1))


@pytest.mark.case("bad-shapes")
def test_they_raise_what_the_expression_raises() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        ops.l2_norm(torch.randn(2, 3), 2)
    for function in (ops.l2_norm, ops.frobenius_norm):
        with pytest.raises(RuntimeError, match="floating point or complex"):
            function(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(("dim", "eps"), [(-1, 0.0), (1, 0.0), (None, 0.0), (-1, 1e-12), (1, 3.0)])
def test_the_gradient_in_closed_form_is_autograds(dim: int | None, eps: float) -> None:
    x = values(4, 5, 6)
    x[1, 2] *= 1e-30 if eps else 1.0
    x.requires_grad_()
    expression = ops.frobenius_norm(x) if dim is None else ops.l2_norm(x, dim, eps)
    dy = torch.randn_like(expression)
    (expected,) = torch.autograd.grad(expression, x, dy)
    norm = x.detach().norm() if dim is None else x.detach().norm(dim=dim, keepdim=True)
    torch.testing.assert_close(gradient(dy, x.detach(), norm, dim, eps), expected)
