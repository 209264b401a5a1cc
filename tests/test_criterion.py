"""The error bound: PyTorch's own ops stay within it, every planted bug does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import L1, randomised
from torch import Tensor, nn

from normswap.criterion import RoundedStatistics, error_share, half_ulp, mask_mismatch, rounds_further
from normswap.kinds import NORMS, kind_of, magnitudes
from normswap.plans import Match

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SITES: dict[str, tuple[Match, Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (Match("layer_norm"), lambda: nn.LayerNorm(96), (16, 96)),
    "group_norm": (Match("group_norm"), lambda: nn.GroupNorm(4, 8), (4, 8, 5, 5)),
    "rms_norm": (Match("rms_norm"), lambda: nn.RMSNorm(96, eps=1e-6), (16, 96)),
    "l1_norm": (Match("l1_norm", {"dim": 1}), L1, (16, 96)),
}


def share(match: Match, site: nn.Module, x: Tensor, ours: Callable[[nn.Module, Tensor], Tensor] | None = None) -> float:
    """The share of the limit of what ``ours`` makes of ``x``; PyTorch's own for None."""
    out = site(x) if ours is None else ours(site, x)
    wide = copy.deepcopy(site).double()
    rounded = match.kind == "l1_norm" and x.dtype is not torch.float32
    with torch.no_grad():
        size = magnitudes(match, copy.deepcopy(wide), x.double(), x.dtype)
        if rounded:
            with RoundedStatistics(x.dtype):
                reference = wide(x.double())
        else:
            reference = wide(x.double())
    return error_share(out, reference, size.output, kind_of(match).c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SITES)
@pytest.mark.parametrize("mean", (0.0, 100.0))
def test_pytorch_passes(kind: str, dtype: torch.dtype, mean: float) -> None:
    match, make, shape = SITES[kind]
    for seed in range(40):
        torch.manual_seed(seed)
        site = randomised(make()).eval().to(dtype)
        with torch.no_grad():
            assert share(match, site, (torch.randn(shape) + mean).to(dtype)) <= 1.0


def forgets_bias(site: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, site.normalized_shape, site.weight, None, site.eps)


def large_eps(site: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, site.normalized_shape, site.weight, site.bias, 1e-3)


def leaves_columns(site: nn.Module, x: Tensor) -> Tensor:
    x32 = x.float()[:, :-3]
    normed = (x.float() - x32.mean(1, keepdim=True)) * (x32.var(1, correction=0, keepdim=True) + site.eps).rsqrt()
    return (normed * site.weight.float() + site.bias.float()).to(x.dtype)


def one_pass(site: nn.Module, x: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.square().mean(1, keepdim=True) - x32.mean(1, keepdim=True).square()
    normed = (x32 - x32.mean(1, keepdim=True)) * (variance.clamp(min=0) + site.eps).rsqrt()
    return (normed * site.weight.float() + site.bias.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("wrong", "dtypes", "mean"),
    [
        (forgets_bias, DTYPES, 0.0),
        (large_eps, DTYPES, 0.0),
        (leaves_columns, DTYPES, 0.0),
        (one_pass, (torch.float32,), 1000.0),
    ],
)
def test_planted_bugs_fail(
    wrong: Callable[[nn.Module, Tensor], Tensor], dtypes: tuple[torch.dtype, ...], mean: float
) -> None:
    for dtype in dtypes:
        for seed in range(20):
            torch.manual_seed(seed)
            site = randomised(nn.LayerNorm(96)).to(dtype)
            x = (torch.randn(64, 96) + mean).to(dtype)
            with torch.no_grad():
                assert share(Match("layer_norm"), site, x, wrong) > 1.0, (dtype, seed)


GRADIENTS_OF: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(96), (16, 96)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 9, 9)),
    "batch_norm": (lambda: nn.BatchNorm2d(8), (4, 8, 9, 9)),
}


@pytest.mark.parametrize(("mean", "off"), ((0.0, 1e-3), (100.0, 1e-2), (1000.0, 0.1)))
@pytest.mark.parametrize("kind", GRADIENTS_OF)
def test_a_gradient_that_is_a_little_off_fails(kind: str, mean: float, off: float) -> None:
    make, shape = GRADIENTS_OF[kind]
    site: Any = randomised(make())
    x, dy = torch.randn(shape) + mean, torch.randn(shape)
    leaf = x.clone().requires_grad_()
    grads = torch.autograd.grad(site(leaf), [leaf, site.weight, site.bias], dy)
    wide, wide_leaf = copy.deepcopy(site).double(), x.double().requires_grad_()
    exact = torch.autograd.grad(wide(wide_leaf), [wide_leaf, wide.weight, wide.bias], dy.double())
    with torch.no_grad():
        size = magnitudes(Match(kind), wide, x.double(), x.dtype).gradients(dy.double())
    for name, ours, reference in zip(("input", "weight", "bias"), grads, exact, strict=True):
        assert error_share(ours, reference, size[name], NORMS[kind].c) <= 1.0
        assert error_share(ours * (1 + off), reference, size[name], NORMS[kind].c) > 1.0


def test_a_gradient_where_a_group_hardly_varies() -> None:
    """Two elements a group, far from zero: what is zero in float64, their difference, is multiplied by errors too."""
    for seed in range(6):
        torch.manual_seed(seed)
        site, x, dy = randomised(nn.GroupNorm(4, 8)), torch.randn(16, 8, 1, 1) * 0.1 + 1e4, torch.randn(16, 8, 1, 1)
        leaf, wide, wide_leaf = x.clone().requires_grad_(), copy.deepcopy(site).double(), x.double().requires_grad_()
        (ours,) = torch.autograd.grad(site(leaf), leaf, dy)
        (exact,) = torch.autograd.grad(wide(wide_leaf), wide_leaf, dy.double())
        with torch.no_grad():
            size = magnitudes(Match("group_norm"), wide, x.double(), x.dtype).gradients(dy.double())
        assert error_share(ours, exact, size["input"], NORMS["group_norm"].c) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_ulp(dtype: torch.dtype) -> None:
    for value in (1.0, 1.5, 2.0, 3.7, 1000.0, 0.01):
        x = torch.tensor([value]).to(dtype)
        above = torch.nextafter(x, torch.full_like(x, float("inf")))
        assert float(half_ulp(x.double(), dtype)) == float(above.double() - x.double()) / 2


def test_what_is_off_and_then_rounded_stays_within_both() -> None:
    """Off by what its input's rounding allows, a gradient lies beyond 1/32, where the spacing is twice as wide."""
    reference, error = torch.tensor([0.0311564], dtype=torch.float64), torch.tensor([1.45e-4], dtype=torch.float64)
    off = (reference + error).half().double() - reference
    limit = half_ulp(reference, torch.float16) + error
    assert off > limit
    assert off <= limit + rounds_further(reference, error, torch.float16)
    assert float(rounds_further(reference, error / 100, torch.float16)) == 0.0


def test_masks() -> None:
    nan, inf = float("nan"), float("inf")
    ours, eager = torch.tensor([1.0, nan, inf, 2.0]), torch.tensor([1.0, nan, inf, nan])
    assert "NaN differs" in mask_mismatch(ours, eager, torch.tensor([1.0, nan, inf, nan]))
    assert mask_mismatch(ours, eager, torch.tensor([1.0, nan, inf, 2.0])) == ""  # PyTorch is the one that is wrong
    assert mask_mismatch(eager, eager, torch.tensor([1.0, nan, inf, nan])) == ""


def test_masks_of_what_does_not_fit_the_dtype() -> None:
    """A variance of 1e9 is Inf in float16; one of what overflowed before is NaN, which is PyTorch's and no better."""
    nan, inf = float("nan"), float("inf")
    wide, eager = torch.tensor([1e9, 1e9, 1e9], dtype=torch.float64), torch.tensor([nan, nan, inf]).half()
    assert mask_mismatch(torch.tensor([inf, nan, inf]).half(), eager, wide) == ""
    assert "NaN differs from PyTorch's in 1 elements, Inf in 2" in mask_mismatch(
        torch.tensor([-inf, nan, 1.0]).half(), eager, wide
    )
    assert "Inf in 1" in mask_mismatch(torch.tensor([inf]).half(), torch.tensor([6e4]).half(), wide[:1])
