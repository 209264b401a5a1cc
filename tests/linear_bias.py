"""Linear -> scale -> BatchNorm in training, where the batch's statistics cancel the Linear's bias: against float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

from normswap.criterion import error_share
from normswap.forwards.linear_scale_batch_norm import linear_scale_batch_norm

ROWS, FEATURES, CHANNELS = 300, 48, 96
TOLERANCE = 1e-4
"""Between float32 and float64, as a share of a tensor's largest value."""
BACKWARD = {"highest": TOLERANCE, "high": 1e-3}
"""The same behind a product in backward: TF32 keeps 11 bits of every factor, which rounds gradients. The inputs and the
Linear's weights here have no more, so that the product in forward is exact in either."""

by_bias = pytest.mark.parametrize("bias", (None, 1.0, 100.0, 1000.0))
by_scale = pytest.mark.parametrize("scale_shape", (None, (), (CHANNELS,)))
by_options = pytest.mark.parametrize(
    "options",
    ({"momentum": 0.3}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}),
    ids=lambda options: " ".join(map(str, *options.items())),
)


class Parts(nn.Module):
    """A Linear whose biases are ``bias`` and half as much around it, perhaps a scale, a BatchNorm."""

    def __init__(self, bias: float | None, scale_shape: tuple[int, ...] | None, **options: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, CHANNELS, bias=bias is not None)
        self.scale = None if scale_shape is None else nn.Parameter(torch.ones(scale_shape))
        self.bn = nn.BatchNorm1d(CHANNELS, eps=1e-2, **options)
        randomised(self)
        with torch.no_grad():
            self.gemm.weight.copy_(_short(self.gemm.weight / FEATURES**0.5))
            if bias is not None:
                self.gemm.bias.mul_(bias / 2).add_(bias)

    def forward(self, x: Tensor) -> Tensor:
        z = self.gemm(x)
        return self.bn(z if self.scale is None else z * self.scale)

    def fused(self, x: Tensor) -> Tensor:
        out = linear_scale_batch_norm(x, self.gemm, self.scale, self.bn)
        assert out is not None, "the original code would run"
        return out


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_training(parts: Parts, precision: str = "highest") -> None:
    """Two steps of ``parts.fused`` and of the original in float64 give the same outputs, gradients and buffers."""
    exact = copy.deepcopy(parts).double()
    device = parts.gemm.weight.device
    for _ in range(2):
        x, dy = _short(torch.randn(ROWS, FEATURES)).to(device), torch.randn(ROWS, CHANNELS).to(device)
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        with matmul_precision(precision):
            out = parts.fused(leaf)
            out.backward(dy)
        expected = exact(wide)
        expected.backward(dy.double())
        _assert_close(out, expected, TOLERANCE, "output")
        _assert_close(leaf.grad, wide.grad, BACKWARD[precision], "gradient of the input")
        for (name, parameter), other in zip(parts.named_parameters(), exact.parameters(), strict=True):
            if name == "gemm.bias":  # 0 but for rounding
                _assert_no_gradient(parts, dy)
            else:
                tolerance = BACKWARD[precision] if name == "gemm.weight" else TOLERANCE
                _assert_close(parameter.grad, other.grad, tolerance, f"gradient of {name}")
        for (name, buffer), other in zip(parts.named_buffers(), exact.buffers(), strict=True):
            _assert_close(buffer, other, TOLERANCE, name)
        parts.zero_grad()
        exact.zero_grad()


def check_rounding(parts: Parts, precision: str = "highest") -> None:
    """Output and running mean err by what float32 rounds of the product: however large the bias, by nothing of it."""
    with torch.no_grad(), matmul_precision(precision):
        x = _short(torch.randn(ROWS, FEATURES)).to(parts.gemm.weight.device)
        z = F.linear(x, parts.gemm.weight).double()
        exact = copy.deepcopy(parts.bn).double()
        out = parts.fused(x)
    scale = 1.0 if parts.scale is None else parts.scale.detach().double()
    u, shift = z * scale, 0.0 if parts.gemm.bias is None else parts.gemm.bias.detach().double() * scale
    expected = exact(u + shift).detach()
    weight, bias = (torch.tensor(1.0), torch.tensor(0.0)) if exact.weight is None else (exact.weight, exact.bias)
    rstd = (u.var(0, correction=0) + exact.eps).rsqrt()
    size = weight.detach().abs() * rstd * (u.abs() + u.square().mean(0).sqrt()) + bias.detach().abs()
    assert error_share(out, expected, size, 4.0) <= 1.0
    if exact.running_mean is not None:
        size = exact.running_mean.abs() + (u.abs() + torch.as_tensor(shift).abs()).mean(0)
        assert error_share(parts.bn.running_mean, exact.running_mean, size, 4.0) <= 1.0


def check_not_finite(parts: Parts) -> None:
    """Biases of NaN and Inf make the same outputs, gradients and buffers NaN, or not finite, as in the original."""
    with torch.no_grad():
        parts.gemm.bias[3], parts.gemm.bias[50], parts.gemm.bias[95] = torch.nan, torch.inf, -torch.inf
    original, x = copy.deepcopy(parts), torch.randn(ROWS, FEATURES).to(parts.gemm.weight.device)
    out, expected = parts.fused(x), original(x)
    assert torch.equal(out.isnan(), expected.isnan())
    for one in (out, expected):
        one.backward(torch.ones_like(one))
    for (name, parameter), other in zip(parts.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(parameter.grad.isnan(), other.grad.isnan()), name
    for (name, buffer), other in zip(parts.named_buffers(), original.buffers(), strict=True):
        assert torch.equal(buffer.isfinite(), other.isfinite()), name


def _short(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _assert_close(ours: Tensor, exact: Tensor, tolerance: float, what: str) -> None:
    ours, exact = ours.detach().double(), exact.detach().double()
    atol = tolerance * float(exact.abs().max() + 1e-3)
    torch.testing.assert_close(ours, exact, rtol=tolerance, atol=atol, msg=lambda text: f"{what}: {text}")


def _assert_no_gradient(parts: Parts, dy: Tensor) -> None:
    """The bias's gradient is small beside the terms that cancel in it."""
    gain = torch.tensor(1.0) if parts.bn.weight is None else parts.bn.weight.detach().abs()
    scale = torch.tensor(1.0) if parts.scale is None else parts.scale.detach().abs()
    terms = dy.abs().sum(0) * gain * scale / parts.bn.eps**0.5
    assert parts.gemm.bias.grad.shape == (CHANNELS,)
    assert bool((parts.gemm.bias.grad.abs() <= TOLERANCE * terms).all())
