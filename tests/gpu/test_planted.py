"""Wrong kernels beside right ones on the GPU: caught by the default validation, put back alone, in three dtypes."""

from __future__ import annotations

import warnings

import pytest
import torch
from faults import FAULTS, KINDS, Parallel, example, plant

import normswap

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_show(fault: str, kind: str, dtype: torch.dtype) -> bool:
    """False where the fault changes less than the dtype can: a mean of 1000 leaves bfloat16 no spread of 1, and a
    matmul in 16 bits rounds more than any of them changes."""
    if kind == "linear_scale_batch_norm":
        return dtype is torch.float32
    return fault != "one-pass variance" or dtype is not torch.bfloat16


PLANTED = [(f, k, d) for f, (_, kinds) in FAULTS.items() for k in kinds for d in DTYPES if can_show(f, k, d)]
NAMES = [f"{fault} in {kind}, {str(dtype)[6:]}" for fault, kind, dtype in PLANTED]


def failed_sites(model: Parallel, x: torch.Tensor) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model, x, min_speedup=None)
    report = normswap.report(swapped)
    failed = [row["name"] for row in report.rows if row["status"] == "failed"]
    assert sorted((*failed, *report.swapped)) == sorted(row["name"] for row in report.rows)
    assert all(row["status"] == "proved" for row in report.rows if row["swapped"]), str(report)
    return failed


@pytest.mark.parametrize(("fault", "kind", "dtype"), PLANTED, ids=NAMES)
def test_it_is_put_back_alone(fault: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, kind)
    model = Parallel(kind, 50, marked={31})
    rows = 1 if dtype is torch.float32 else 20
    x = torch.cat([example(fault, kind, model) for _ in range(rows)]).detach().to("cuda", dtype)
    x.requires_grad_(kind == "l1_norm")
    assert failed_sites(model.to("cuda", dtype).train(), x) == ["sites.31"]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_all_are_kept(kind: str, dtype: torch.dtype) -> None:
    model = Parallel(kind, 4, marked={1, 2}).to("cuda", dtype).train()
    assert failed_sites(model, torch.randn(400, 24, device="cuda", dtype=dtype)) == []
