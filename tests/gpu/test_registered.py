"""Registered classes on the GPU: our kernels run, and are proved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap
from normswap.rules import registered


class Gain(nn.Module):
    """An RMSNorm that stores, so that it is not recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        self.last = None
        return F.rms_norm(x, (256,), self.gamma, 1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=lambda dtype: str(dtype)[6:])
def test_a_registered_class_is_proved(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", {})
    normswap.register_norm("rms_norm", weight="gamma", eps=1e-6)(Gain)
    model, x = randomised(nn.Sequential(Gain())).to("cuda", dtype).eval(), torch.randn(64, 256).to("cuda", dtype)
    report = normswap.report(normswap.optimize(model, x, min_speedup=None))
    assert [row["status"] for row in report.rows] == ["proved"] and report.rows[0]["gradients"], str(report)
