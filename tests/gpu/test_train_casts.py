"""Norms that autocast's products read, on the GPU: rounded at once they have the bits of the cast after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from casts_models import FEEDING, feeds, made
from models import randomised
from norm_models import assert_close, drawn
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops
from normswap.activation import NONE, Activation

DEVICE = "cuda"
LOW = (torch.bfloat16, torch.float16)
ACTIVATIONS = (NONE, Activation("relu"), Activation("clamp", -0.3, 0.7), Activation("silu"))
by_low = pytest.mark.parametrize("low", LOW, ids=str)


@by_low
@pytest.mark.parametrize("dtype", (torch.float32, *LOW), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)
@pytest.mark.case("autocast", "fused-activation", "channels-last")
def test_the_bits_are_those_of_the_cast(activation: Activation, dtype: torch.dtype, low: torch.dtype) -> None:
    weight, bias = (drawn((64,), DEVICE) for _ in range(2))
    image, row = drawn((3, 64, 14, 14), DEVICE, dtype), drawn((7, 5, 64), DEVICE, dtype)
    residual = drawn((3, 64, 14, 14), DEVICE)

    def group_norm(x: Tensor, **named: Any) -> Tensor:
        return ops.group_norm(x, 8, weight, bias, 1e-5, activation, **named)

    def layer_norm(x: Tensor, **named: Any) -> Tensor:
        return ops.layer_norm(x, (64,), weight, bias, activation=activation, **named)

    with torch.autocast(DEVICE, low):
        for op, x, options in (
            (group_norm, image, {}),
            (group_norm, image.to(memory_format=torch.channels_last), {}),
            (group_norm, image, {"residual": residual}),
            (layer_norm, row, {}),
            (layer_norm, row, {"residual": row + 1}),
        ):
            for learning in (False, True):
                wide, at_once = (op(x.requires_grad_(learning), **options, **to) for to in ({}, {"dtype": low}))
                if isinstance(wide, tuple):
                    assert torch.equal(wide[1], at_once[1])
                    wide, at_once = wide[0], at_once[0]
                assert wide.dtype is torch.float32 and at_once.dtype is low and at_once.stride() == wide.stride()
                assert torch.equal(at_once, wide.to(low))


@by_low
@pytest.mark.case("autocast")
def test_gradients_are_those_of_the_cast(low: torch.dtype) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = drawn((4, 32, 9, 9), DEVICE, low).to(memory_format=layout)
        weight, bias = drawn((32,), DEVICE).requires_grad_(), drawn((32,), DEVICE).requires_grad_()
        dy = drawn((4, 32, 9, 9), DEVICE, low).to(memory_format=layout)
        found = []
        for to in ({}, {"dtype": low}):
            leaf = x.detach().clone().requires_grad_()
            with torch.autocast(DEVICE, low):
                out = ops.group_norm(leaf, 4, weight, bias, 1e-5, Activation("relu"), **to)
            found.append(torch.autograd.grad(out.to(low), (leaf, weight, bias), dy))
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)


@by_low
@pytest.mark.parametrize("name", [name for name, (_, _, found) in FEEDING.items() if any(found)])
def test_models_are_proved_and_compute_the_same(name: str, low: torch.dtype) -> None:
    model, x = made(name, DEVICE)
    with torch.autocast(DEVICE, low):
        fast = normswap.optimize(model, x, min_speedup=None, on_mismatch="raise")
        report = normswap.report(fast)
        assert any(feeds(report.plan)) and {r["status"] for r in report.rows if r["swapped"]} == {"proved"}
        with torch.no_grad():
            assert_close(fast(x), model(x))


@by_low
def test_the_norm_adds_16_bits_to_float32(low: torch.dtype) -> None:
    model, x = made("block", DEVICE)
    with torch.autocast(DEVICE, low):
        fast = normswap.optimize(model, x, min_speedup=None)
        sums = []
        for one in (model, fast):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                one(x)
            sums.append(sum(event.name == "aten::add" for event in profiled.events()))
    assert sums == [2, 1]


def test_nothing_is_cast_between_a_norm_and_its_convolution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(8, 32, 3), nn.GroupNorm(4, 32), nn.ReLU()
            self.last = nn.Conv2d(32, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.act(self.norm(self.conv(x))))

    model, x = randomised(Net()).cuda(), drawn((2, 8, 16, 16), DEVICE, torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=True):
        fast = normswap.optimize(model, x, min_speedup=None)
        casts = []
        for one in (model, fast):
            with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                one(x)
            casts.append(
                sum(e.name == "aten::_to_copy" and e.input_shapes[:1] == [[2, 32, 14, 14]] for e in profiled.events())
            )
    assert casts[1] == 0 < casts[0]
