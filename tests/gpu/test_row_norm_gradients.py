"""Gradients of layer_norm, rms_norm and l1_norm on the GPU against float64, and what goes to PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within
from row_checks import DTYPES, WEIGHTS, affine, gradients, values

from normswap import ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_layer_norm_gradients(dtype: torch.dtype, cols: int) -> None:
    x, (w, b) = values(12, cols, dtype, 1.0), affine(cols, dtype)
    dy = values(12, cols, dtype, 0.0, seed=5)
    ours = gradients(lambda x, w, b: ops.layer_norm(x, (cols,), w, b), (x, w, b), dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    exact = gradients(lambda x, w, b: F.layer_norm(x, (cols,), w, b), (x64, w64, b.double()), dy64)
    rstd = (x64.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat, g = rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()), (dy64 * w64).abs()
    dx = rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))
    for mine, ref, size in zip(ours, exact, (dx, (dy64.abs() * xhat).sum(0), dy64.abs().sum(0)), strict=True):
        assert_within(mine, ref, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_rms_norm_gradients(dtype: torch.dtype, cols: int) -> None:
    x, (w, _) = values(12, cols, dtype, 1.0), affine(cols, dtype)
    dy = values(12, cols, dtype, 0.0, seed=5)
    ours = gradients(lambda x, w: ops.rms_norm(x, (cols,), w, 1e-6), (x, w), dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    exact = gradients(lambda x, w: F.rms_norm(x, (cols,), w, 1e-6), (x64, w64), dy64)
    rstd = (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    xhat, g = rstd * x64.abs(), (dy64 * w64).abs()
    dx = rstd * (g + xhat * (g * xhat).mean(-1, keepdim=True))
    for mine, ref, size in zip(ours, exact, (dx, (dy64.abs() * xhat).sum(0)), strict=True):
        assert_within(mine, ref, size)


@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_l1_norm_gradients(cols: int) -> None:
    x, dy = values(12, cols, torch.float32, 1.0), values(12, cols, torch.float32, 0.0, seed=5)
    (ours,) = gradients(ops.l1_norm, (x,), dy)
    (exact,) = gradients(lambda x: x / x.abs().mean(-1, keepdim=True), (x.double(),), dy.double())
    mean = x.double().abs().mean(-1, keepdim=True)
    size = dy.double().abs() / mean + (dy * x).double().abs().mean(-1, keepdim=True) / mean**2
    assert_within(ours, exact, size)


@pytest.mark.case("requires-grad-each", "strided-gradient")
def test_partial_gradients_and_expanded_cotangents() -> None:
    x, (w, b) = values(7, 300, torch.float32, 1.0), affine(300, torch.float32)
    for wanted in range(3):
        tensors = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, w, b))]
        ops.layer_norm(tensors[0], (300,), *tensors[1:]).sum().backward()
        alike = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate((x, w, b))]
        F.layer_norm(alike[0], (300,), *alike[1:]).sum().backward()
        torch.testing.assert_close(tensors[wanted].grad, alike[wanted].grad, rtol=1e-4, atol=1e-4)
        assert all(t.grad is None for i, t in enumerate(tensors) if i != wanted)


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.case("double-backward")
def test_double_backward(kind: str) -> None:
    x = values(5, 40, torch.float32, 1.0).requires_grad_()
    weight = affine(40, torch.float32)[0].requires_grad_()
    ours, plain = {
        "layer_norm": (lambda: ops.layer_norm(x, (40,), weight), lambda: F.layer_norm(x, (40,), weight)),
        "rms_norm": (lambda: ops.rms_norm(x, (40,), weight, 1e-6), lambda: F.rms_norm(x, (40,), weight, 1e-6)),
        "l1_norm": (lambda: ops.l1_norm(x), lambda: x / x.abs().mean(-1, keepdim=True)),
    }[kind]

    def second(function):
        (first,) = torch.autograd.grad(function().pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(ours), second(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.case("functorch", "forward-mode-ad")
def test_transforms_go_to_pytorch() -> None:
    x, (w, b) = values(5, 40, torch.float32, 1.0), affine(40, torch.float32)
    tangent = values(5, 40, torch.float32, 0.0, seed=9)
    for ours, plain in (
        (lambda x: ops.layer_norm(x, (40,), w, b), lambda x: F.layer_norm(x, (40,), w, b)),
        (lambda x: ops.rms_norm(x, (40,), w, 1e-6), lambda x: F.rms_norm(x, (40,), w, 1e-6)),
        (lambda x: ops.l1_norm(x), lambda x: x / x.abs().mean(-1, keepdim=True)),
    ):
        torch.testing.assert_close(torch.vmap(ours)(x), torch.vmap(plain)(x))
        torch.testing.assert_close(torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)))
        expected = torch.func.jvp(plain, (x,), (tangent,))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            got = torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent
            torch.testing.assert_close(got, expected)
