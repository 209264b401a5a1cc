"""The native ops for convolutions with norms behind them, by PyTorch's own ops on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from normswap import modules, native, reference
from normswap.activation import FUNCTIONS, NONE, Activation
from normswap.ops import convolution, dispatch
from normswap.ops.convolution import WAYS
from normswap.regions import chain


def by_pytorch(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """What the native op does, by PyTorch's own."""
    *how, groups, mean, var, gain, offset, eps, added, code, low, high, way = rest
    fits = x.dim() == 4 and x.numel() > 0 and x.shape[1] == weight.shape[1] * groups and mean is not None
    if torch.is_grad_enabled() or not fits or not x.dtype == weight.dtype == mean.dtype:
        return None
    if any(t is not None and t.numel() != len(weight) for t in (bias, mean, var, gain, offset)):
        return None
    fold: Any = reference.fold_scale_batch_norm
    out = F.conv2d(x, *fold(weight, bias, None, mean, var, gain, offset, eps), how[:2], how[2:4], how[4:], groups)
    act = Activation([*FUNCTIONS][code], low, high)
    assert way == WAYS["scaled"] or act.name == "relu" or (way == WAYS["matmul"] and act == NONE and added is None)
    return act(out if added is None else out + added)


def several_by_pytorch(x: Any, tensors: Any, numbers: Any, floats: Any, added: Any) -> Any:
    """The same of several, one behind the other."""
    count = len(floats) // 3
    assert len(tensors) == 6 * count and len(numbers) == 9 * count <= 36
    for i in range(count):
        (weight, bias, *norm), (*geometry, code, way) = tensors[6 * i : 6 * i + 6], numbers[9 * i : 9 * i + 9]
        behind = added if i == count - 1 else None
        one, low, high = floats[3 * i : 3 * i + 3]
        x = by_pytorch(x, weight, bias, *geometry, *norm, one, behind, code, low, high, way)
        if x is None:
            return None
    return x


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU: the native ops for convolutions, and no other ones."""
    native.load()  # or it would put its own in their place when it is
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = {"convolution_batch_norm_eval": by_pytorch, "convolutions_batch_norm_eval": several_by_pytorch}
    monkeypatch.setattr(dispatch, "_direct", found)
    monkeypatch.setattr(dispatch, "_native_tried", True)
    monkeypatch.setattr(native, "_available", False)
    monkeypatch.setattr(modules, "_made", WeakIdKeyDictionary())  # those of other tests know what cuDNN fuses
    for module in (convolution, chain):
        monkeypatch.setattr(module, "FUSED", (torch.float32, torch.bfloat16))
