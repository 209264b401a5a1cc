"""Regions on the GPU: the tables of what is found, what looks like it and what changes, and that each is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import randomised
from norm_models import DTYPES
from region_checks import CHANNELS, check, written
from region_models import FOUND, sum_by_function, sum_used_later
from region_tables import TABLE
from region_views import VIEWS, WINDOWS, window_block

import normswap


@pytest.fixture(autouse=True)
def _convolutions_in_float32() -> Iterator[None]:
    """TF32 would make a thousandth of the last bit before a convolution, where that crosses a rounding."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.case("region", "region-look-alikes", "region-changed-later")
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, case in (FOUND | VIEWS).items() if case.found])
def test_every_region_is_proved(name: str, dtype: torch.dtype) -> None:
    case = (FOUND | VIEWS)[name]
    model = randomised(written(case.forward)).to("cuda", dtype).eval()
    inputs = tuple(torch.randn(shape, device="cuda").to(dtype) for shape in case.shapes)
    normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise")


def _summands(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    made = [torch.randn(32, 64, CHANNELS, device="cuda").to(dtype) for _ in range(2)]
    for i, name in enumerate(("input", "residual")):
        if layout in (f"{name} transposed", "both transposed"):
            made[i] = made[i].transpose(1, 2).contiguous().transpose(1, 2)
        if layout == f"{name} broadcast":
            made[i] = made[i][:1]
    return tuple(made)


@pytest.mark.parametrize("autocast", (False, True), ids=("", "autocast"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("forward", (sum_used_later, sum_by_function))
@pytest.mark.parametrize(
    "layout",
    ("input transposed", "residual transposed", "both transposed", "input broadcast", "residual broadcast"),
)
@pytest.mark.case("region", "autocast", "strided-input")
def test_a_sum_of_any_layout_is_proved_with_its_gradients(
    layout: str, forward: Callable[..., Any], dtype: torch.dtype, autocast: bool
) -> None:
    model = randomised(written(forward)).to("cuda", torch.float32 if autocast else dtype).train()
    with torch.autocast("cuda", dtype, enabled=autocast):
        found = normswap.optimize(model, _summands(layout, dtype), min_speedup=None, on_mismatch="raise")
    assert [row["status"] for row in normswap.report(found).rows if row["kind"] == "region"] == ["proved"]


def given_out(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + y
    return h, self.norm(h)


def test_a_sum_that_is_given_out_has_all_of_its_gradient() -> None:
    model = randomised(written(given_out)).cuda()
    x, y, dy = (torch.randn(4, 3, CHANNELS, device="cuda", requires_grad=i < 2) for i in range(3))
    swapped = normswap.optimize(model, (x, y), min_speedup=None, on_mismatch="raise")

    def seen(module: Any) -> list[torch.Tensor]:
        h, n = module(x, y)
        h.retain_grad()
        (alone,) = torch.autograd.grad(n, h, dy, retain_graph=True)
        ((n * dy).sum() + (h * dy).sum()).backward()
        return [alone, h.grad]

    for ours, theirs in zip(seen(swapped), seen(model), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_in_another_shape_is_added_by_our_kernel(dtype: torch.dtype) -> None:
    model = randomised(written(window_block)).to("cuda", dtype).eval()
    x = torch.randn(WINDOWS, device="cuda").to(dtype)
    swapped = normswap.optimize(model, x, {"y": x}, min_speedup=None, on_mismatch="raise")
    assert [row["status"] for row in normswap.report(swapped).rows if row["kind"] == "region"] == ["proved"]
    with torch.no_grad(), torch.profiler.profile() as seen:
        swapped(x, x)
    names = [event.name for event in seen.events()]
    assert names.count("aten::add") == 1  # the sum behind, which is normalised in no forward
