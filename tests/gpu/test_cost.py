"""What optimize() costs on a whole model: time and memory, proof and timing included."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch

import normswap

timm = pytest.importorskip("timm")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("float32", "float16"))
def test_vit_base_in_less_than_five_seconds(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    model = timm.create_model("vit_base_patch16_224").to("cuda", dtype).eval()
    x = torch.randn(8, 3, 224, 224, device="cuda", dtype=dtype)
    with torch.no_grad():
        model(x)  # libraries load
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        swapped = normswap.optimize(model, x)
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    report = normswap.report(swapped)
    for name, value in (("seconds", seconds), ("model_MB", size / 1e6), ("peak_MB", peak / 1e6)):
        record_property(name, round(value, 2))
    timed = [row for row in report.rows if "gain" in row]
    assert sum(row["kind"] == "layer_norm" for row in timed) == 25 and all(row["gain"] is not None for row in timed)
    assert sum(row["kind"] == "region" for row in timed) == 12
    assert all(row["gain"] >= 1.0 for row in timed if row["swapped"])
    assert all(row["status"] in ("proved", "slower") for row in report.rows)
    assert seconds < 5.0
    assert peak < size + 512e6 + 200e6  # the copy, the proof, and the activations of a batch of 8
