"""Norms along any dim without a GPU: the autograd around stand-ins for the kernels, which fill what they are given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from normswap import ops, reference
from normswap.ops import dispatch
from normswap.ops.l1_norm import gradient as l1_gradient

EPS = 1e-3


class StandIns:
    """The kernels, each named as the native op, and which of them were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def layer_norm_dim(self, x: Tensor, w: Any, b: Any, dim: int, eps: float, out: Tensor, *statistics: Any) -> None:
        out.copy_(reference.layer_norm_dim(x, dim, w, b, eps))

    def rms_norm_dim(self, x: Tensor, w: Any, dim: int, eps: float, out: Tensor, rstd: Any) -> None:
        out.copy_(reference.rms_norm_dim(x, dim, w, eps))
        if rstd is not None:
            rstd.copy_((x.square().mean(dim, keepdim=True) + eps).rsqrt())

    def rms_norm_dim_backward(self, dy: Tensor, x: Tensor, w: Any, rstd: Tensor, dim: int, dx: Tensor, dw: Any) -> None:
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        g = dy if w is None else dy * w.view(shape)
        dx.copy_(rstd * (g - x * rstd**2 * (g * x).mean(dim, keepdim=True)))
        if dw is not None:
            dw.copy_((dy * x * rstd).sum([d for d in range(x.dim()) if d != dim]))

    def l1_norm_dim(self, x: Tensor, dim: int, eps: float, minimum: float, out: Tensor, mean_abs: Any) -> None:
        out.copy_(reference.l1_norm(x, dim, eps, minimum or None))
        if mean_abs is not None:
            mean_abs.copy_(x.abs().mean(dim, keepdim=True))

    def l1_norm_dim_backward(self, dy: Tensor, x: Tensor, mean: Tensor, dim: int, *rest: Any) -> None:
        eps, minimum, dx = rest
        dx.copy_(l1_gradient(dy, x, mean, dim, eps, minimum or None))

    def l2_norm_dim(self, x: Tensor, dim: int, eps: float, out: Tensor, norm: Any) -> None:
        out.copy_(reference.l2_norm(x, dim, eps))
        if norm is not None:
            norm.copy_(x.norm(dim=dim, keepdim=True))

    def l2_norm(self, x: Tensor, cols: int, eps: float, out: Tensor, norm: Any, _: int) -> None:
        rows = x.reshape(-1, cols)
        out.copy_(reference.l2_norm(rows, 1, eps).view(x.shape))
        if norm is not None:
            norm.copy_(rows.norm(dim=1).view(norm.shape))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the stand-ins that were called, in the place of the kernels."""
    made = StandIns()

    def op(name: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            made.called.append(name)
            assert all(t.is_contiguous() for t in given if isinstance(t, Tensor))
            getattr(made, name)(*given)

        return call

    for name in (name for name in vars(StandIns) if "norm" in name):
        monkeypatch.setattr(torch.ops.normswap, name, SimpleNamespace(default=op(name)), raising=False)
    for module in ("layer_norm", "rms_norm", "l1_norm", "l2_norm"):
        monkeypatch.setattr(sys.modules[f"normswap.ops.{module}"], "native_serves", lambda *tensors, **elements: True)
    return made.called


CALLS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer_norm_dim": (lambda of, x, w, b: of.layer_norm_dim(x, 1, w, b, EPS), 3),
    "rms_norm_dim": (lambda of, x, w: of.rms_norm_dim(x, 1, w, EPS), 2),
    "l1_norm_dim": (lambda of, x: of.l1_norm(x, 1, EPS), 1),
    "l2_norm_dim": (lambda of, x: of.l2_norm(x, 1, EPS), 1),
    "l2_norm": (lambda of, x: of.frobenius_norm(x), 1),
}


def drawn(count: int) -> list[Tensor]:
    return [torch.randn(2, 4, 3, 5), torch.randn(4), torch.randn(4)][:count]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("asked", range(8))
@pytest.mark.case("double-backward")
def test_the_gradients_asked_for_are_the_formula_s(name: str, asked: int, called: list[str]) -> None:
    call, count = CALLS[name]
    tensors = [t.requires_grad_(bool(asked >> i & 1)) for i, t in enumerate(drawn(count))]
    learning, dy = [t for t in tensors if t.requires_grad], torch.randn(2, 4, 3, 5)
    ours, theirs = call(ops, *tensors), call(reference, *tensors)
    torch.testing.assert_close(ours, theirs)
    assert called == [name] and ours.requires_grad == bool(learning)
    if not learning:
        return
    for create in (False, True):
        found = [torch.autograd.grad(y, learning, dy, retain_graph=True, create_graph=create) for y in (ours, theirs)]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        if create and tensors[0].requires_grad:
            second = [torch.autograd.grad(first[0].square().sum(), tensors[0]) for first in found]
            torch.testing.assert_close(*second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ("rms_norm_dim", "l1_norm_dim"))
def test_from_a_length_on_pytorch_differentiates(name: str, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call, count = CALLS[name]
    tensors, dy = [t.requires_grad_() for t in drawn(count)], torch.randn(2, 4, 3, 5)
    for longest in (4, 3):
        monkeypatch.setattr(sys.modules[f"normswap.ops.{name.removesuffix('_dim')}"], "MAX_DIM_BACKWARD", longest)
        found = (torch.autograd.grad(y, tensors, dy) for y in (call(ops, *tensors), call(reference, *tensors)))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert called == [name, f"{name}_backward", name]
    assert dispatch.MAX_DIM_BACKWARD == 512


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.case("functorch")
def test_a_backward_under_vmap_is_the_formula_s(name: str, called: list[str]) -> None:
    call, count = CALLS[name]
    tensors, dys = [t.requires_grad_() for t in drawn(count)], torch.randn(3, 2, 4, 3, 5)
    found = []
    for y in (call(ops, *tensors), call(reference, *tensors)):
        found.append(torch.autograd.grad(y, tensors, dys, is_grads_batched=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert called == [name]
