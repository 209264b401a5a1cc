"""cuDNN's convolutions that end in a ReLU, for tensors of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from normswap import modules, native, ops
from normswap.ops import dispatch

CALLED: list[str] = []
"""One for each call."""


def _relu(x: Tensor, weight: Tensor, bias: Tensor, *how: Any) -> Tensor:
    CALLED.append("convolution")
    return F.conv2d(x, weight, bias, *how).relu()


def _add_relu(x: Tensor, weight: Tensor, added: Tensor, alpha: Any, bias: Tensor, *how: Any) -> Tensor:
    assert alpha == 1
    CALLED.append("convolution")
    return (F.conv2d(x, weight, bias, *how) + added).relu()


@pytest.fixture(scope="module")
def cudnn() -> Iterator[None]:
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("cudnn_convolution_relu", _relu, "CPU")
    aten.impl("cudnn_convolution_add_relu", _add_relu, "CPU")
    yield
    aten._destroy()


@pytest.fixture
def by_python(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU, and nothing of ours that is compiled."""
    native.load()  # or it would put its own in their place when it is
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {})
    monkeypatch.setattr(dispatch, "_native_tried", True)
    monkeypatch.setattr(native, "_available", False)
    monkeypatch.setattr(modules, "_made", WeakIdKeyDictionary())  # those of other tests know what cuDNN fuses
    monkeypatch.setattr(ops.convolution, "FUSED", (torch.float16, torch.bfloat16))
    CALLED.clear()
