"""l1_norm and rms_norm along a dimension that is not the last, on the GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from limits import assert_within, same_bits
from torch import Tensor

from normswap import ops, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (
    ((4, 64, 20, 16), 1),
    ((3, 5, 7), 1),
    ((2, 130, 33), 1),
    ((300, 65), 0),
    ((2, 513, 24), 1),
    ((5000, 40), 0),
    ((2, 3, 4, 5, 6), 2),
    ((2, 3, 4, 5, 6), -2),
    ((1, 320, 8, 8), 1),
    ((7, 1, 9), 1),
    ((70_000, 3, 2), 1),
)


def values(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.3, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, device="cuda") + mean).to(dtype)


def weight_of(n: int, dtype: torch.dtype) -> Tensor:
    return values((n,), dtype, 0.5, seed=1)


def exact_rms(x: Tensor, weight: Tensor | None, dim: int, eps: float) -> Tensor:
    return reference.rms_norm_dim(x.double(), dim, None if weight is None else weight.double(), eps)


def along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.view([-1 if i == dim % x.dim() else 1 for i in range(x.dim())])


def gradient_scale(x: Tensor, dy: Tensor, dim: int) -> Tensor:
    """The size of the terms whose difference the gradient of a position is."""
    x, dy = x.double(), dy.double()
    mean = x.abs().mean(dim, keepdim=True)
    return (dy.abs() / mean).amax(dim, keepdim=True) + (dy * x).abs().mean(dim, keepdim=True) / mean**2


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dtype: torch.dtype) -> None:
    for shape, dim in SHAPES:
        x = values(shape, dtype)
        before = x.clone()
        exact = exact_rms(x, None, dim, 1e-6)
        assert_within(ops.rms_norm_dim(x, dim), exact, exact.abs(), f"rms {shape} {dim}")
        weight = weight_of(shape[dim], dtype)
        exact = exact_rms(x, weight, dim, 1e-6)
        assert_within(ops.rms_norm_dim(x, dim, weight), exact, exact.abs(), f"rms {shape} {dim} with weight")
        ours = ops.l1_norm(x, dim)
        torch.testing.assert_close(ours, reference.l1_norm(x, dim))
        assert ours.is_contiguous() and same_bits(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_addresses(dtype: torch.dtype) -> None:
    x = values((3, 24, 10, 16), dtype)
    shifted = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(x.shape).copy_(x)
    assert same_bits(ops.l1_norm(x, 1), ops.l1_norm(shifted, 1))
    assert same_bits(ops.rms_norm_dim(x, 1), ops.rms_norm_dim(shifted, 1))
    for alike in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(ops.l1_norm(alike, 1), ops.l1_norm(x, 1))
        torch.testing.assert_close(ops.rms_norm_dim(alike, 1), ops.rms_norm_dim(x, 1))
        assert ops.l1_norm(alike, 1).stride() == alike.stride()
    expanded = x[:1].expand(5, -1, -1, -1)
    assert same_bits(ops.l1_norm(expanded, 1), reference.l1_norm(expanded, 1))
    assert same_bits(ops.rms_norm_dim(expanded, 1)[3], ops.rms_norm_dim(x[:1], 1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_does_not_depend_on_the_batch_or_the_run(dtype: torch.dtype) -> None:
    for shape in ((5, 64, 9, 7), (3, 700, 40)):
        x = values(shape, dtype)
        for function in (lambda x: ops.l1_norm(x, 1), lambda x: ops.rms_norm_dim(x, 1)):
            whole = function(x)
            assert all(same_bits(whole, function(x)) for _ in range(10))
            assert all(same_bits(whole[i : i + 1], function(x[i : i + 1])) for i in range(len(x)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_non_finite_values_stay_in_their_position(dtype: torch.dtype) -> None:
    x = values((2, 48, 6, 8), dtype)
    x[0, :, 0, 0] = 0
    x[0, 5, 1, 1], x[1, 6, 2, 3] = float("nan"), float("inf")
    for ours, plain in (
        (ops.l1_norm(x, 1), reference.l1_norm(x, 1)),
        (ops.rms_norm_dim(x, 1), reference.rms_norm_dim(x, 1)),
    ):
        assert torch.equal(ours.isnan(), plain.isnan()) and torch.equal(ours.isinf(), plain.isinf())
    assert ops.l1_norm(x, 1)[0, :, 0, 0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("eps", "minimum"), ((0.0, None), (1e-2, None), (0.0, 0.5)))
def test_l1_gradients(dtype: torch.dtype, eps: float, minimum: float | None) -> None:
    for shape, dim in SHAPES:
        x, dy = values(shape, dtype), values(shape, dtype, 0.0, seed=9)
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        ours, plain = ops.l1_norm(leaf, dim, eps, minimum), reference.l1_norm(exact, dim, eps, minimum)
        torch.testing.assert_close(ours, reference.l1_norm(x, dim, eps, minimum))
        ours.backward(dy)
        plain.backward(dy.double())
        scale = gradient_scale(x, dy, dim)
        # A mean that lies on the other side of the minimum once rounded decides otherwise.
        mean = x.double().abs().mean(dim, keepdim=True)
        near = torch.zeros_like(mean) if minimum is None else (mean / minimum - 1).abs() < torch.finfo(dtype).eps
        off = (leaf.grad.double() - exact.grad).abs() > 8 * torch.finfo(dtype).eps * scale
        assert not (off & (near == 0)).any(), (shape, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", (False, True))
def test_rms_gradients(dtype: torch.dtype, weighted: bool) -> None:
    for shape, dim in SHAPES:
        x, dy = values(shape, dtype), values(shape, dtype, 0.0, seed=9)
        weight = weight_of(shape[dim], dtype) if weighted else None
        leaves = [x.clone().requires_grad_(), None if weight is None else weight.clone().requires_grad_()]
        exact = [x.double().requires_grad_(), None if weight is None else weight.double().requires_grad_()]
        ops.rms_norm_dim(leaves[0], dim, leaves[1]).backward(dy)
        exact_rms(exact[0], exact[1], dim, 1e-6).backward(dy.double())
        scale = gradient_scale(x, dy if weight is None else dy * along(weight, x, dim), dim)
        off = (leaves[0].grad.double() - exact[0].grad).abs() > 8 * torch.finfo(dtype).eps * scale
        assert not off.any(), (shape, dim)
        if weighted:
            size = (dy.double() * exact_rms(x, None, dim, 1e-6)).abs().transpose(0, dim).flatten(1).sum(1)
            assert ((leaves[1].grad.double() - exact[1].grad).abs() <= 4 * torch.finfo(dtype).eps * size).all()


def test_partial_gradients_expanded_cotangents_and_double_backward() -> None:
    x = values((3, 20, 6), torch.float32).requires_grad_()
    ops.l1_norm(x, 1).sum().backward()
    alike = x.detach().clone().requires_grad_()
    reference.l1_norm(alike, 1).sum().backward()
    torch.testing.assert_close(x.grad, alike.grad, rtol=1e-4, atol=1e-4)
    weight = weight_of(20, torch.float32).requires_grad_()
    ops.rms_norm_dim(x.detach(), 1, weight).sum().backward()
    assert weight.grad is not None

    def second(function):
        (first,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for ours, plain in ((ops.l1_norm, reference.l1_norm), (ops.rms_norm_dim, reference.rms_norm_dim)):
        torch.testing.assert_close(
            second(lambda x, f=ours: f(x, 1)), second(lambda x, f=plain: f(x, 1)), rtol=1e-3, atol=1e-3
        )


def test_empty_and_large() -> None:
    assert ops.l1_norm(torch.empty(0, 4, 3, device="cuda"), 1).shape == (0, 4, 3)
    assert ops.rms_norm_dim(torch.empty(2, 4, 0, device="cuda"), 1).shape == (2, 4, 0)
    x = torch.randn(1, 64, 1024, device="cuda", dtype=torch.float16).expand(33_000, -1, -1).contiguous()
    assert x.numel() > 2**31
    ours, expected = ops.l1_norm(x, 1), ops.l1_norm(x[:1], 1)
    for i in (0, 17_000, 32_999):
        assert same_bits(ours[i : i + 1], expected)
