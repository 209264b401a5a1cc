"""A layer_norm of float32 that only autocast's products read, on the GPU: its kernels store 16 bits, and take
gradients of 16 bits, with the bits of the casts that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import same_bits, tensor
from models import randomised
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import normswap
from normswap import native, ops

LOW = (torch.bfloat16, torch.float16)
by_low = pytest.mark.parametrize("low", LOW, ids=str)
SHORT = (8, 16, 24, 32, 64, 128, 136, 256, 264, 384, 512, 640, 768, 776, 1000, 1024)
LONG = (1032, 2048, 2056, 4096, 5000, 8192, 8200, 12_288, 16_384, 16_392, 32_768, 65_536, 65_544, 98_304, 131_072)
VERY_LONG = (131_080, 1_048_576, 1_048_584, 4_194_304)


def rows_of(cols: int) -> tuple[int, ...]:
    return (1, 5, 1700) if cols <= 1024 else (1, 7, 150) if cols < 20_000 else (1, 9)


def at_once(x: Tensor, weight: Tensor | None, bias: Tensor | None, low: torch.dtype, recorded: bool = False) -> Any:
    way = "recorded" if recorded else "or_none"
    op = getattr(torch.ops.normswap, f"layer_norm_{way}").default
    return op(x, 1, weight, bias, 1e-5, None, None, None, 0, 0.0, 0.0, low)


def alike(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for what NaN is."""
    a, b = (t.masked_fill(t.isnan(), 7.0) if same_bits(a, b) else t for t in (a, b))
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


@by_low
@pytest.mark.case("autocast", "one-element", "long-row", "non-finite-rows", "zero-rows")
def test_the_bits_are_those_of_the_cast(low: torch.dtype) -> None:
    for cols in (*SHORT, *LONG, *VERY_LONG):
        weight, bias = tensor((cols,), torch.float32, 0.5, 1), tensor((cols,), torch.float32, seed=2)
        weight[::3], bias[::3] = -0.0, -0.0
        weight[1::5] *= 1e5  # beyond float16
        for rows in rows_of(cols):
            x = tensor((rows, cols), torch.float32, 3.0)
            if rows > 4:
                x[1], x[2, 3], x[3, 5] = 0.0, float("nan"), float("inf")
            for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
                expected, _, kept = torch.ops.normswap.layer_norm_recorded(x, 1, *given, 1e-5)
                out, total = at_once(x, *given, low)
                assert total is None and alike(out, expected.to(low)), (rows, cols)
                out, _, statistics = at_once(x, *given, low, True)
                assert alike(out, expected.to(low)) and same_bits(statistics, kept), (rows, cols)


@by_low
@pytest.mark.case("autocast", "ragged-rows", "misaligned")
def test_what_the_kernels_do_not_store_declines(low: torch.dtype) -> None:
    weight = torch.ones(64, device="cuda")
    x = tensor((4, 64), torch.float32)
    for cols in (1, 7, 10, 12, 770, 1001):
        assert at_once(tensor((3, cols), torch.float32), None, None, low) == (None, None)
    shifted = torch.empty(4 * 64 + 1, device="cuda")[1:].view(4, 64).copy_(x)
    for given, w in ((shifted, None), (x.t().contiguous().t(), None), (x, weight.to(low)), (x.to(low), weight)):
        other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
        assert at_once(given, w, None, other if given.dtype is low else low) == (None, None)
    scale = torch.ones(4, 64, device="cuda")
    for residual, adaptive, code in ((x, None, 0), (None, scale, 0), (None, None, 1)):
        given = (x, 1, None, None, 1e-5, residual, adaptive, adaptive, code, 0.0, 0.0, low)
        assert torch.ops.normswap.layer_norm_or_none(*given) == (None, None)
    assert at_once(x, None, None, torch.float64) == (None, None)
    for dtype in (None, torch.float32):
        assert at_once(x, weight, None, dtype)[0].dtype is torch.float32


@by_low
@pytest.mark.case("autocast", "ragged-rows", "misaligned", "strided-input")
def test_the_op_has_the_bits_and_the_gradients_of_the_cast(low: torch.dtype) -> None:
    """Also of rows that are cast behind the norm."""
    for cols in (8, 10, 12, 96, 256, 264, 768, 770, 1024, 2048, 5000, 16_384):
        weight, bias = (tensor((cols,), torch.float32, 0.5, seed).requires_grad_() for seed in (1, 2))
        x, dy = tensor((3, 50, cols), torch.float32, 3.0), tensor((3, 50, cols), low, seed=4)
        shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
        for given in (x, shifted, x.transpose(0, 1).contiguous().transpose(0, 1)):
            for affine in ((weight, bias), (None, None)):
                found = []
                for dtype in (None, low):
                    leaf = given.detach().requires_grad_()
                    with torch.autocast("cuda", low):
                        out = ops.layer_norm(leaf, (cols,), *affine, dtype=dtype)
                    learning = [t for t in (leaf, *affine) if t is not None]
                    out = out.to(low)
                    found.append([out, *torch.autograd.grad(out, learning, dy)])
                assert all(a.dtype is b.dtype and same_bits(a, b) for a, b in zip(*found, strict=True)), cols


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.lin(self.norm(x))
        return out


class Cast(Block):
    """As it was: the norm is float32, and cast by the product."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        out = ops.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return x + F.linear(out, self.lin.weight, self.lin.bias)


def pair(width: int, low: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor]:
    """The block, swapped, the one that casts, and an input."""
    model = randomised(Block(width)).cuda()
    before = Cast(width).cuda()
    before.load_state_dict(model.state_dict())
    with torch.autocast("cuda", low):
        return normswap.apply(model, normswap.plan(model)), before, tensor((4, 33, width), torch.float32, 1.0)


def launches(call: Callable[[], object]) -> int:
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiled.events())


def outcome(model: nn.Module, x: Tensor, low: torch.dtype, **how: Any) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", low):
        out = checkpoint(model, leaf, **how) if how else model(leaf)
    return [out, *torch.autograd.grad(out.sin().sum(), (leaf, *model.parameters()))]


@by_low
@pytest.mark.parametrize(("width", "fewer"), ((768, 1), (1024, 1), (24, 1), (770, 0), (10, 0)))
@pytest.mark.case("autocast", "region", "ragged-rows")
def test_a_block_has_the_same_bits_with_one_kernel_less_each_way(width: int, fewer: int, low: torch.dtype) -> None:
    assert native.status().available
    ours, before, x = pair(width, low)
    for how in ({}, {"use_reentrant": False}):
        found = (outcome(model, x, low, **how) for model in (ours, before))
        assert all(a.dtype is b.dtype and same_bits(a, b) for a, b in zip(*found, strict=True)), how

    def forward(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", low):
            out: Tensor = model(x)
        return out

    with torch.no_grad():
        assert same_bits(forward(ours), forward(before))
        assert launches(lambda: forward(ours)) == launches(lambda: forward(before)) - fewer
    x.requires_grad_()
    of_backward = []
    for model in (ours, before):
        out, learning = forward(model), (x, *model.parameters())
        dy = torch.ones_like(out)
        back = lambda out=out, dy=dy, of=learning: torch.autograd.grad(out, of, dy, retain_graph=True)  # noqa: E731
        of_backward.append(launches(back))
    assert of_backward[0] == of_backward[1] - fewer


@by_low
@pytest.mark.case("autocast", "double-backward", "functorch")
def test_a_backward_again_and_under_vmap(low: torch.dtype) -> None:
    ours, before, x = pair(64, low)
    dys, found = tensor((5, 4, 33, 64), torch.float32, seed=3), []
    for model in (ours, before):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", low):
            out = model(leaf)
        batched = torch.autograd.grad(out, leaf, dys, retain_graph=True, is_grads_batched=True)[0]
        (once,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
        found.append([batched, once, *torch.autograd.grad(once.square().sum(), (leaf, model.norm.weight))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@by_low
@pytest.mark.case("autocast")
def test_no_more_is_saved(low: torch.dtype) -> None:
    ours, before, x = pair(768, low)
    saved = []
    for model in (ours, before):
        kept: dict[int, int] = {}

        def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cuda", low):
            out = model(leaf)
        saved.append(sum(kept.values()))
        assert out.dtype is torch.float32
    assert saved[0] <= saved[1]


@by_low
@pytest.mark.case("autocast")
def test_it_is_proved_and_put_off_for_a_block_of_code(low: torch.dtype) -> None:
    model, x = randomised(Block(768)).cuda(), tensor((4, 33, 768), torch.float32, 1.0)
    with torch.autocast("cuda", low):
        fast = normswap.optimize(model, x, min_speedup=None, on_mismatch="raise")
        assert {r["status"] for r in normswap.report(fast).rows if r["swapped"]} == {"proved"}
        with torch.no_grad(), normswap.disabled(fast):
            assert torch.equal(fast(x), model(x))
        seen: list[torch.dtype] = []
        fast.lin.register_forward_pre_hook(lambda module, given: seen.append(given[0].dtype))
        fast(x)
    assert seen == [torch.float32]  # who looks sees what PyTorch gives
