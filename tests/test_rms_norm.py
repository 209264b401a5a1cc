"""RMSNorms written by hand: the classes of a pinned transformers, and every look-alike."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap import modules, ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZE = 48

TRANSFORMERS = (
    "llama.LlamaRMSNorm",
    "mistral.MistralRMSNorm",
    "qwen2.Qwen2RMSNorm",
    "qwen3.Qwen3RMSNorm",
    "deepseek_v3.DeepseekV3RMSNorm",
    "t5.T5LayerNorm",
    "idefics.IdeficsRMSNorm",
    "gemma.GemmaRMSNorm",
    "gemma3.Gemma3RMSNorm",
    "qwen3_next.Qwen3NextRMSNorm",
    "olmo2.Olmo2RMSNorm",
    "gpt_oss.GptOssRMSNorm",
    "helium.HeliumRMSNorm",
    "moshi.MoshiRMSNorm",
    "llama4.Llama4TextRMSNorm",
    "llama4.Llama4TextL2Norm",
    "imagegpt.ImageGPTLayerNorm",
)


def from_transformers(name: str) -> nn.Module:
    module, _, cls = name.partition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), cls)
    return found(1e-5) if cls == "Llama4TextL2Norm" else found(SIZE, eps=1e-5)


def randomised(module: nn.Module, spread: float = 1.0) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_().mul_(spread)
    return module


def gradients(module: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(module(leaf), [leaf, *module.parameters()], cotangent))


class Calls:
    """Counts the calls of our ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("rms_norm", "rms_norm_dim"):
            monkeypatch.setattr(ops, name, self._counted(getattr(ops, name)))

    def _counted(self, op: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            return op(*args, **kwargs)

        return counted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


TOLERANCE = {
    # A few roundings of the dtype: the two compute in another order.
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    scale = float(theirs.float().abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(scale, 1e-3))


@pytest.mark.case("rms-cast-orders", "dtypes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_classes_of_transformers_are_swapped_and_equal(name: str, dtype: torch.dtype, calls: Calls) -> None:
    module = randomised(from_transformers(name)).to(dtype).eval()
    x = (3 * torch.randn(5, 7, SIZE)).to(dtype)
    swapped = normswap.optimize(module, x, validate="grad")
    row = normswap.report(swapped).rows[0]
    assert (row["kind"], row["status"]) == ("rms_norm", "wiring"), str(row)
    assert isinstance(swapped, type(module)) and swapped.state_dict().keys() == module.state_dict().keys()
    before = calls.count
    assert_same(swapped(x), module(x), dtype)
    by_hand_only = name == "imagegpt.ImageGPTLayerNorm" and dtype is not torch.float32  # it squares in 16 bits
    assert calls.count == before + (not by_hand_only)
    cotangent = torch.randn_like(module(x))
    for ours, theirs in zip(gradients(swapped, x, cotangent), gradients(module, x, cotangent), strict=True):
        assert_same(ours, theirs, dtype)
    for twin in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert torch.equal(twin(x), swapped(x)) and modules.site_match(twin) == modules.site_match(swapped)
    assert type(normswap.revert(swapped)) is type(module)


def test_names_of_twelve_classes() -> None:
    assert len(TRANSFORMERS) >= 12
