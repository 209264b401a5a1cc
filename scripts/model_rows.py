"""The whole models that check_models.py runs: what they are, on what, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """A model with its inputs, all to be moved to the GPU, in ``dtype``; ``training``, in float32 ``under_autocast`` in
    ``dtype``, else in that itself."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Tensor]]
    dtype: torch.dtype = torch.float16
    channels_last: bool = False
    training: bool = False
    under_autocast: bool = False

    @property
    def told(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} autocast" if self.under_autocast else dtype

    def made(self) -> tuple[nn.Module, list[Tensor]]:
        dtype = torch.float32 if self.under_autocast else self.dtype
        with torch.device("cuda"):
            model = drawn(self.make()).to(dtype).train(self.training)
        inputs = [x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in self.inputs()]
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
            inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
        return model, inputs

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """In which it is run and optimized."""
        with torch.set_grad_enabled(self.training), torch.autocast("cuda", self.dtype, enabled=self.under_autocast):
            yield


def drawn(model: nn.Module) -> nn.Module:
    """Random weights and biases, made where the model is: a norm that forgets them shows."""
    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for parameter in module.parameters(recurse=False):
                parameter.normal_(1.0 if is_norm else 0.0, 0.2 if parameter.dim() < 2 else 0.02)
    return model


def timm_model(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name)

    return make


def images(batch: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: [torch.randn(batch, 3, 224, 224)]


def tokens(batch: int, length: int, known: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: [torch.randint(0, known, (batch, length))]


class LastHidden(nn.Module):
    """A model of transformers that gives a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, return_dict=False)[0]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return LastHidden(BertModel(BertConfig()))


def llama(layers: int) -> Callable[[], nn.Module]:
    """Of the width of Llama 3.2 1B."""

    def make() -> nn.Module:
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
        return LastHidden(LlamaModel(LlamaConfig(vocab_size=32000, num_hidden_layers=layers, use_cache=False, **sizes)))

    return make


class DiTBlock(nn.Module):
    """Adaptive LayerNorm before attention and MLP, as in DiT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width: int = 1152, heads: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class ResBlock(nn.Module):
    """As in Stable Diffusion's U-Net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(1280, channels)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class SpatialTransformer(nn.Module):
    def __init__(self, channels: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.heads, self.qkv, self.proj = heads, nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        h = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(h)).view(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = h + self.mlp(self.norm2(h))
        return x + h.transpose(1, 2).reshape(x.shape)


class UNetBlocks(nn.Module):
    """Two levels of Stable Diffusion 1's U-Net on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([ResBlock(320), ResBlock(320)])
        self.attention1, self.down = SpatialTransformer(320), nn.Conv2d(320, 640, 3, stride=2, padding=1)
        self.second = nn.ModuleList([ResBlock(640), ResBlock(640)])
        self.attention2 = SpatialTransformer(640)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for block in self.first:
            x = self.attention1(block(x, t))
        x = self.down(x)
        for block in self.second:
            x = self.attention2(block(x, t))
        return x


ROWS = (
    Row("resnet50_gn", timm_model("resnet50_gn"), images(64)),
    Row("resnet50_gn channels_last", timm_model("resnet50_gn"), images(64), channels_last=True),
    Row("resnet50 channels_last", timm_model("resnet50"), images(64), channels_last=True),
    Row("resnet50 channels_last, batch 8", timm_model("resnet50"), images(8), channels_last=True),
    Row("densenet121 channels_last", timm_model("densenet121"), images(64), channels_last=True),
    Row("regnety_032 channels_last", timm_model("regnety_032"), images(64), channels_last=True),
    Row("efficientnet_b0 channels_last", timm_model("efficientnet_b0"), images(64), channels_last=True),
    Row("mobilenetv3 channels_last", timm_model("mobilenetv3_large_100"), images(64), channels_last=True),
    Row("resnetv2_50x1_bit", timm_model("resnetv2_50x1_bit"), images(64)),
    Row("convnext_base", timm_model("convnext_base"), images(64)),
    Row("vit_base", timm_model("vit_base_patch16_224"), images(64)),
    Row("vit_base, batch 32", timm_model("vit_base_patch16_224"), images(32)),
    Row("swin_base", timm_model("swin_base_patch4_window7_224"), images(64)),
    Row("mixer_b16", timm_model("mixer_b16_224"), images(64)),
    Row("bert-base", bert, tokens(64, 128, 30000)),
    Row("llama 1B", llama(16), tokens(8, 512, 32000), torch.bfloat16),
    Row("dit-like", DiT, lambda: [torch.randn(16, 256, 1152), torch.randn(16, 1152)]),
    Row("sd-unet-like", UNetBlocks, lambda: [torch.randn(8, 320, 64, 64), torch.randn(8, 1280)]),
)
"""Eval."""

_step = partial(Row, dtype=torch.bfloat16, training=True)
_autocast_step = partial(_step, under_autocast=True)
STEPS = (
    _autocast_step("resnet50_gn step", timm_model("resnet50_gn"), images(64), channels_last=True),
    _autocast_step("resnet50 step", timm_model("resnet50"), images(64), channels_last=True),
    _autocast_step("vit_base step", timm_model("vit_base_patch16_224"), images(64)),
    _autocast_step("convnext_base step", timm_model("convnext_base"), images(64)),
    _step("llama step", llama(8), tokens(8, 512, 32000)),
)
"""Whole steps of training."""
