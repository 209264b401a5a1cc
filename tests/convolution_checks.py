"""What the tests of convolutions with norms behind them ask of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of values about 1 to 10: some roundings of the dtype. The tight bound is the proof's."""


def outcome(model: nn.Module, x: Tensor, learning: bool = False) -> Any:
    """The output and gradients by name, or what is raised."""
    x = x.clone().requires_grad_(learning)
    model.zero_grad()
    torch.manual_seed(1)
    try:
        with torch.set_grad_enabled(learning):
            out = model(x)
            if not (learning and out.requires_grad):
                return out.detach(), {}
            out.backward(torch.cos(torch.arange(out.numel()).to(out)).view(out.shape))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    gradients = {"input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return out.detach(), {name: g for name, g in gradients.items() if g is not None}
