"""What is measured besides: the norms of real networks at their shapes, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from workloads import (
    NO_TARGET,
    GroupNorm,
    L1Norm,
    LayerNorm,
    LinearScaleBatchNorm,
    RMSNormByHand,
    Target,
    Workload,
    group_norm_silu,
)

LARGE_BYTES = 12_000_000
"""Of an input: beyond it a row is held to a multiple of a copy, below it to microseconds more than one."""
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
RESNET50 = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
"""Channels and sizes of resnet50's norms."""


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of NCHW, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class BatchNormAddReLU(nn.Module):
    """As at the end of a residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        return torch.relu(self.bn(x) + shortcut)


class WithShortcut(nn.Module):
    """A ``block`` that is given the shortcut too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.shortcut = block, None

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.shortcut)


def group_norm_relu(num_groups: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(num_groups, channels), nn.ReLU())


def network_workloads(shrink: int = 1) -> list[Workload]:
    """Norms of networks that people run, each tagged with the network's name and "network"."""
    found = (*_group_norms(), *_layer_norms(), *_rms_norms())
    return [_aimed(_shrunk(one, shrink)) for one in found]


def _aimed(workload: Workload) -> Workload:
    """Tagged, and held to a copy of its input."""
    large = workload.dtype.itemsize * torch.Size(workload.shape).numel() > LARGE_BYTES
    target = Target(of_copy=1.3) if large else Target(copy_plus_us=4.0)
    return replace(workload, target=target, tags=workload.tags | {"network"})


def _shrunk(workload: Workload, shrink: int) -> Workload:
    return replace(workload, shape=(max(1, workload.shape[0] // shrink), *workload.shape[1:]))


def _group_norms() -> Iterator[Workload]:
    norm, silu, relu = (
        (GroupNorm, "group_norm"),
        (group_norm_silu, "group_norm + silu"),
        (group_norm_relu, "group_norm + relu"),
    )
    bit = [(64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7)]
    unet = [(320, 64), (640, 32), (1280, 16), (1280, 8)]
    networks = (  # tag, batches, channels and sizes, what
        ("resnet50_gn", (64,), RESNET50, norm),
        ("resnetv2_50x1_bit", (64,), bit, relu),
        ("stable_diffusion_unet", (2, 16), unet, silu),
        ("stable_diffusion_vae", (1,), [(512, 64), (512, 128), (256, 512), (128, 512)], silu),
    )
    for tag, batches, images, (make, name) in networks:
        for batch in batches:
            for channels, size in images:
                for layout in (CONTIGUOUS, CHANNELS_LAST):
                    shape = (batch, channels, size, size)
                    yield _image(tag, name, lambda make=make, c=channels: make(32, c), shape, layout)
    instance = lambda: nn.InstanceNorm3d(32, affine=True)  # noqa: E731
    for dtype in (F32, F16):
        volume = _image("nnunet", "instance_norm", instance, (2, 32, 128, 128, 128), CONTIGUOUS)
        yield replace(volume, dtype=dtype)
    yield _image("audio", "group_norm", lambda: GroupNorm(1, 512), (16, 512, 3000), CONTIGUOUS)


def _image(
    tag: str, name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], layout: torch.memory_format
) -> Workload:
    return Workload(name, make, shape, 0, F16, layout, tags=frozenset({tag}))


def _layer_norms() -> Iterator[Workload]:
    rows = (  # tag, shape, normalised over the last dim
        *(("swin_base", (64, size, size, channels)) for size, channels in ((56, 128), (28, 256), (14, 512), (7, 1024))),
        *(
            ("convnext_tiny", (64, size, size, channels))
            for size, channels in ((56, 96), (28, 192), (14, 384), (7, 768))
        ),
        ("vit_base", (64, 197, 768)),
        ("vit_large", (64, 197, 1024)),
        ("bert_base", (8, 128, 768)),
        ("bert_base", (32, 512, 768)),
        ("whisper_large", (1, 1500, 1280)),
        ("whisper_large", (8, 1500, 1280)),
    )
    for tag, shape in rows:
        width = shape[-1]
        yield _norm(tag, "layer_norm", lambda n=width: LayerNorm((n,)), shape, 2 * width, F16)
    for size, channels in ((56, 96), (28, 192), (14, 384), (7, 768)):
        shape = (64, channels, size, size)
        over = lambda n=channels: LayerNorm2d(n)  # noqa: E731
        yield _norm("convnext_tiny", "layer_norm over channels", over, shape, 2 * channels, F16)


def _rms_norms() -> Iterator[Workload]:
    for tokens in (1, 64, 512, 8192):
        for width in (2048, 4096, 8192):
            yield _norm("llama", "rms_norm", lambda n=width: RMSNormByHand(n), (tokens, width), width, BF16)
    for width, heads in ((64, 16), (128, 32)):  # the norms of queries and keys, a head a row
        for tokens in (1, 2048):
            shape = (tokens, heads, width)
            yield _norm("qwen_heads", "rms_norm", lambda n=width: RMSNormByHand(n), shape, width, BF16)


def _norm(
    tag: str, name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], parameters: int, dtype: torch.dtype
) -> Workload:
    return Workload(name, make, shape, parameters, dtype, tags=frozenset({tag}))


# --- forward and backward ---------------------------------------------------------------------------------------------

ROWS, GROUPS, CHANNELS_LAST_GROUPS = Target(of_floor=1 / 1.2), Target(of_floor=1 / 1.35), Target(of_floor=1 / 1.7)
SMALL = Target(copy_plus_us=12.0)
"""Of a small row: a copy is one of the three kernels that forward and backward are at least."""


def backward_workloads(shrink: int = 1) -> list[Workload]:
    """Forward and backward, tagged "backward"; the floor of a norm is five passes over its input at the copy rate."""
    plane = (64, 256, 256)
    found = [
        _row("layer_norm", (16384, 4096), BF16, ROWS),
        _row("layer_norm", (50432, 768), F16, ROWS),
        _row("layer_norm", (1576, 768), F16, SMALL),
        _row("rms_norm", (16384, 4096), BF16, ROWS),
        _row("rms_norm", (4096, 8192), BF16, ROWS),
        _row("layer_norm", (50432, 768), BF16, ROWS, autocast=True),
        _row("rms_norm", (16384, 4096), BF16, ROWS, autocast=True),
        Workload("layer_norm", lambda: LayerNorm(plane), (16, *plane), 2 * 64 * 256 * 256, target=Target(of_floor=0.7)),
        Workload("l1_norm", L1Norm, (8192, 65535), target=Target(of_floor=0.85)),
        *(_groups(shape, groups, F16, layout, silu) for shape, groups, silu in _IMAGES for layout in _LAYOUTS),
        *(_groups(shape, 32, BF16, layout, silu, True) for shape, _, silu in _IMAGES[:2] for layout in _LAYOUTS),
        _groups((28, 64, 512, 512), 8, F32, CONTIGUOUS, False),
        *(
            Workload(
                "linear_scale_batch_norm",
                lambda: LinearScaleBatchNorm(4096, 4096),
                (16384, 4096),
                dtype=dtype,
                target=Target(of_compile=1.0),
            )
            for dtype in (F32, BF16)
        ),
    ]
    return [replace(_shrunk(one, shrink), backward=True, training=True, tags=frozenset({"backward"})) for one in found]


_LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)
_IMAGES = (  # shape, groups, whether a SiLU follows
    ((64, 256, 56, 56), 32, False),
    ((8, 128, 256, 256), 32, True),
    *(((64, channels, size, size), 32, False) for channels, size in RESNET50 if (channels, size) != (256, 56)),
    ((16, 320, 64, 64), 32, True),
    ((16, 640, 32, 32), 32, True),
    ((16, 1280, 16, 16), 32, True),
)


PASSES = {"batch_norm": 0.0, "batch_norm + relu": 0.0, "batch_norm + add + relu": 1.0}
"""Of the residual and its gradient, each way; the bits kept of the ReLU come to it."""


def batch_norm_workloads(shrink: int = 1) -> list[Workload]:
    """BatchNorm by the batch's statistics, tagged "batch_norms": forward, and forward and backward. Each pass over the
    input counts: statistics and output, sums and gradient."""
    kinds = ((F16, CHANNELS_LAST), (BF16, CHANNELS_LAST), (F32, CONTIGUOUS))
    rows = [((64, channels, size, size), *kind) for channels, size in RESNET50 for kind in kinds]
    found = [_batch_norm(name, *row, backward) for row in rows for name in PASSES for backward in (False, True)]
    large = _batch_norm("batch_norm", (64, 64, 512, 512), F32, CONTIGUOUS, False)
    return [_shrunk(one, shrink) for one in (*found, replace(large, target=Target(of_floor=1 / 1.1)))]


def _batch_norm(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, backward: bool
) -> Workload:
    adds, channels = PASSES[name], shape[1]
    more = adds * (1 + 1 / (8 * dtype.itemsize))
    makes: dict[str, Callable[[], nn.Module]] = {
        "batch_norm": lambda: nn.BatchNorm2d(channels),
        "batch_norm + relu": lambda: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()),
        "batch_norm + add + relu": lambda: WithShortcut(BatchNormAddReLU(channels)),
    }
    large = dtype.itemsize * torch.Size(shape).numel() > 16e6
    return Workload(
        name,
        makes[name],
        shape,
        dtype=dtype,
        memory_format=layout,
        training=True,
        backward=backward,
        weights=F32,
        shortcut=adds > 0,
        passes=3 + more + (5 + more if backward else 0),
        target=Target(of_floor=1 / 1.35) if large else NO_TARGET,
        tags=frozenset({"batch_norms"}),
    )


def _row(name: str, shape: tuple[int, int], dtype: torch.dtype, target: Target, autocast: bool = False) -> Workload:
    width = shape[1]
    makes = {"layer_norm": lambda: LayerNorm((width,)), "rms_norm": lambda: nn.RMSNorm(width, eps=1e-6)}
    weights = {"layer_norm": 2 * width, "rms_norm": width}
    return Workload(name, makes[name], shape, weights[name], dtype, autocast=autocast, target=target)


def _groups(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    layout: torch.memory_format,
    silu: bool,
    autocast: bool = False,
) -> Workload:
    name, make = ("group_norm + silu", group_norm_silu) if silu else ("group_norm", GroupNorm)
    target = GROUPS if layout is CONTIGUOUS else CHANNELS_LAST_GROUPS
    return Workload(name, lambda: make(groups, shape[1]), shape, 0, dtype, layout, autocast=autocast, target=target)
