"""Regions on the GPU: the tables of what is found, what looks like it and what changes, and that each is proved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import randomised
from norm_models import DTYPES
from region_checks import Case, check, written
from region_look_alikes import CHANGED, LOOK_ALIKES
from region_models import FOUND

import normswap

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED}


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
@pytest.mark.parametrize("name", [name for name, case in FOUND.items() if case.found])
def test_every_region_is_proved(name: str, dtype: torch.dtype) -> None:
    case = FOUND[name]
    model = randomised(written(case.forward)).to("cuda", dtype).eval()
    inputs = tuple(torch.randn(shape, device="cuda").to(dtype) for shape in case.shapes)
    normswap.optimize(model, inputs, min_speedup=None, on_mismatch="raise")
