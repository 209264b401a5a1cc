"""Norms written out inside a larger forward, on the GPU: what they were, and proved with our kernel."""

from __future__ import annotations

import pytest
import region_expressions
import torch
from models import randomised
from norm_models import DTYPES
from region_checks import Case, assert_same, check, swap, written
from torch import Tensor

import normswap
from normswap.proof.comparison import KernelWitness

TABLE: dict[str, Case] = {**region_expressions.FOUND, **region_expressions.ALIKE}
WIDE = (64, 96, 8)


def made(name: str, dtype: torch.dtype, shape: tuple[int, ...] = WIDE) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = randomised(written(TABLE[name].forward)).to("cuda", dtype).eval()
    return model, tuple(torch.randn(shape, device="cuda").to(dtype) for _ in range(2))


@pytest.mark.case("region", "region-look-alikes")
@pytest.mark.parametrize("name", TABLE)
def test_what_is_found_computes_what_it_did(name: str) -> None:
    check(TABLE[name], "eval", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", region_expressions.FOUND)
def test_every_expression_is_proved_with_its_gradients(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(name, dtype)
    report = normswap.report(normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise", validate="grad"))
    (row,) = (row for row in report.rows if row["name"] == "")
    assert row["status"] == "proved"


@pytest.mark.parametrize("kind", region_expressions.SPELLINGS)
def test_our_kernel_runs_and_autocast_and_float64_are_as_they_were(kind: str) -> None:
    name = next(name for name in region_expressions.FOUND if name.startswith(f"{kind} "))
    model, inputs = made(name, torch.float32)
    swapped = swap(model)
    with KernelWitness() as witness, torch.no_grad():
        swapped(*inputs)
    assert witness.ran
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            for given in (inputs, tuple(t.to(dtype) for t in inputs)):
                with torch.no_grad():
                    ours, theirs = swapped(*given), model(*given)
                for mine, original in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(mine, original, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    assert_same(swapped.double(), model.double(), tuple(t.double() for t in inputs), False)
