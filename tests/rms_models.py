"""RMSNorms written by hand, in every spelling and of transformers, and how a swapped one is compared."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import ops
from normswap.kinds import rms_norm
from normswap.ops import at_once

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
C = 6


class Norm(nn.Module):
    """What the forwards below read."""

    shape: tuple[int, ...] = (C,)
    extra: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.shape))
        self.eps = 1e-5
        self.register_parameter("bias", None)


class Unweighted(nn.Module):
    """No parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-3
        self.dim = -1
        self.with_scale = False
        self.force = True


class ByHand(nn.Module):
    """As Llama's, of any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


# --- spellings ----------------------------------------------------------------------------------------------------


class Squared(Norm):
    def forward(self, x):
        y = x.float()
        return (self.weight * (y * torch.rsqrt(torch.square(y).mean(-1, keepdim=True) + self.eps))).type_as(x)


class Times(Norm):
    def forward(self, x):
        y = x.to(torch.float32)
        root = torch.sqrt((y * y).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (y / root).to(x.dtype)


class Reciprocal(Norm):
    def forward(self, x: Tensor) -> Tensor:
        """In the words of the paper."""
        dtype = x.dtype
        wide = x.to(dtype=torch.float32)
        rstd = 1 / torch.sqrt(torch.mean(wide**2, [-1], keepdim=True).add(self.eps))
        return (wide * rstd).to(dtype) * self.weight


class Power(Norm):
    def forward(self, x):
        y = torch.pow(x.float(), 2).mean((-1,), True) + self.eps
        return torch.mul(x.float() * y.pow(-0.5), 1 + self.weight.float()).to(x.dtype)


class Literal(Norm):
    def forward(self, x):
        y = x.float()
        return (y * (1e-3 + y.pow(2).mean(-1, keepdim=True)).rsqrt()).to(x.dtype) * self.weight


class Helpers(Norm):
    def _norm(self, x, eps):
        return x * torch.rsqrt(self._square(x).mean(-1, keepdim=True) + eps)

    def _square(self, x):
        return x.pow(2)

    def forward(self, x):
        return self._norm(x.float(), self.eps).type_as(x) * self.weight


def rms(x, eps=1e-6):
    return x * rstd_of(x, eps)


def rstd_of(x, eps):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Functions(Norm):
    """Falcon Mamba's way."""

    def forward(self, x):
        return self.weight * rms(x.float(), eps=self.eps).to(x.dtype)


class Optional_(Norm):
    """Diffusers' way: weight and bias may be None."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            if self.weight.dtype in [torch.float16, torch.bfloat16]:
                hidden_states = hidden_states.to(self.weight.dtype)
            hidden_states = hidden_states * self.weight
            if self.bias is not None:
                hidden_states = hidden_states + self.bias
        else:
            hidden_states = hidden_states.to(input_dtype)
        return hidden_states


class NoEps(Norm):
    def forward(self, x):
        y = x.float()
        return (y * y.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype) * self.weight


class Moved(Norm):
    """To the device of its input, where it is already."""

    def forward(self, x):
        y = x.float()
        y = y * (y**2).mean(axis=-1, keepdim=True).add(self.eps).sqrt().reciprocal()
        return self.weight.to(x.device) * y.to(x.dtype)


class NoWeight(Unweighted):
    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Flags(Unweighted):
    """xLSTM's way."""

    def forward(self, x):
        dtype = x.dtype
        if self.force:
            x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=self.dim, keepdim=True) + self.eps)
        return x.to(dtype) if not self.with_scale else x.to(dtype) * self.scale


class TrainingIsRead(Unweighted):
    def forward(self, x):
        if self.training:
            y = x.float()
        else:
            y = x.to(torch.float32)
        return (y / (y.square().mean(-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


class Sub(nn.RMSNorm):
    """A torch.nn.RMSNorm in name."""

    def forward(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


class OfChannels(Unweighted):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)


class OfChannelsWeighted(Norm):
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + self.eps)
        return (y * self.weight[:, None, None]).to(x.dtype)


class OfChannelsViewed(Norm):
    def forward(self, x):
        y = x / torch.sqrt(x.square().mean(dim=1, keepdim=True) + self.eps)
        return y * self.weight.view(1, -1, 1, 1)


class OfChannelsOffset(Norm):
    shape = (C, 1, 1)

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class OfTheThirdLast(Norm):
    shape = (C, 1, 1)

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-3, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


LAST = (
    *(Squared, Times, Reciprocal, Power, Literal, NoEps, Moved),
    *(Helpers, Functions, Optional_, NoWeight, Flags, TrainingIsRead),
)
CHANNELS = (OfChannels, OfChannelsWeighted, OfChannelsViewed, OfChannelsOffset, OfTheThirdLast)


def made(cls: type[nn.Module]) -> nn.Module:
    return randomised(Sub(C) if cls is Sub else cls()).eval()


def shape_for(cls: type[nn.Module]) -> tuple[int, ...]:
    return (4, C, 3, 5) if cls in CHANNELS else (4, 5, C)


# --- transformers --------------------------------------------------------------------------------------------------

SIZE = 48

TRANSFORMERS = (
    "llama.LlamaRMSNorm",
    "mistral.MistralRMSNorm",
    "qwen2.Qwen2RMSNorm",
    "qwen3.Qwen3RMSNorm",
    "deepseek_v3.DeepseekV3RMSNorm",
    "t5.T5LayerNorm",
    "idefics.IdeficsRMSNorm",
    "phi3.Phi3RMSNorm",
    "gemma.GemmaRMSNorm",
    "gemma2.Gemma2RMSNorm",
    "gemma3.Gemma3RMSNorm",
    "qwen3_next.Qwen3NextRMSNorm",
    "olmo2.Olmo2RMSNorm",
    "gpt_oss.GptOssRMSNorm",
    "falcon_mamba.FalconMambaRMSNorm",
    "helium.HeliumRMSNorm",
    "moshi.MoshiRMSNorm",
    "llama4.Llama4TextRMSNorm",
    "llama4.Llama4TextL2Norm",
    "imagegpt.ImageGPTLayerNorm",
)


def from_transformers(name: str, size: int = SIZE) -> nn.Module:
    module, _, cls = name.partition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), cls)
    return found(1e-5) if cls == "Llama4TextL2Norm" else found(size, eps=1e-5)


NARROW = (OfChannels, OfChannelsViewed, Sub, "imagegpt.ImageGPTLayerNorm")
"""Those that square in the dtype of a 16-bit input: their own code runs there."""


def tiny_model(name: str) -> Any:
    """A model of transformers of two layers, with random weights."""
    module = importlib.import_module(f"transformers.models.{name}")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 90, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    title = name.capitalize()
    config = getattr(module, f"{title}Config")(**sizes, **heads)
    model = getattr(module, f"{title}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


# --- comparing -----------------------------------------------------------------------------------------------------


def gradients(module: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(module(leaf), [leaf, *module.parameters()], cotangent))


class Calls:
    """Counts the calls that our ops answer, or C++; ``rms_norm_directly`` declines some that ``rms_norm`` gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for owner, name in ((ops, "rms_norm"), (ops, "rms_norm_dim"), (rms_norm, "rms_norm_directly")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        made = at_once.Norm.made
        monkeypatch.setattr(at_once.Norm, "made", lambda norm, calls: self._counted(made(norm, calls)))
        for one in list(at_once._every):
            if not isinstance(one.norm, at_once.Guarded):  # which answers with what is counted within
                monkeypatch.setattr(one, "call", self._counted(one.call))

    def _counted(self, op: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            self.count += out is not None
            return out

        return counted


TOLERANCE = {
    # A few roundings of the dtype: the two compute in another order.
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Equal within what an input of ``dtype`` allows."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    scale = float(theirs.detach().float().abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(scale, 1e-3))


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Near, with the same strides."""
    assert ours.stride() == theirs.stride()
    assert_near(ours, theirs, dtype)


def check(module: nn.Module, x: Tensor, calls: Calls, served: bool = True) -> Any:
    """Swap, prove, and compare with the original; whether our op ran must be as ``served`` says."""
    swapped = normswap.optimize(module, x, validate="grad", min_speedup=None)
    row = normswap.report(swapped).rows[0]
    assert row["kind"] == "rms_norm" and row["swapped"] and row["status"] in ("wiring", "proved"), row
    before = calls.count
    assert_same(swapped(x), module(x), x.dtype)
    assert (calls.count > before) == served
    cotangent = torch.randn_like(module(x))
    for ours, theirs in zip(gradients(swapped, x, cotangent), gradients(module, x, cotangent), strict=True):
        assert_near(ours, theirs, x.dtype)
    return swapped
