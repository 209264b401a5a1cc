"""What is measured: the four models the kernels exist for, written as a user would write them, and common sizes.

The shapes of real networks, and forward with backward, stand in networks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


class L1Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(x)


class GroupNorm(nn.Module):
    def __init__(self, num_groups: int, channels: int) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(num_groups, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.gn(x)


class LinearScaleBatchNorm(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        x = x * self.scale
        return self.bn(x)


class RMSNormByHand(nn.Module):
    """Llama's, over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class ChannelRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


def group_norm_silu(num_groups: int, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.GroupNorm(num_groups, channels), nn.SiLU())


@dataclass(frozen=True)
class Target:
    """How long a row may take, in shares that hold on any GPU; where several are given, all of them."""

    of_floor: float | None = None
    """The floor is at least this share of the time."""
    of_copy: float | None = None
    """At most so many times a copy of the same input, timed alike."""
    copy_plus_us: float | None = None
    """At most so many microseconds more than that copy."""
    of_compile: float | None = None
    """At most so many times torch.compile's."""
    of_linear: float | None = None
    """At most so many times the Linear alone, timed in the same run ..."""
    linear_plus_ms: float = 0.0
    """... and milliseconds."""

    def limit_ms(self, floor_ms: float, times: Mapping[str, float]) -> float | None:
        """The most milliseconds that meet it beside ``times`` of the same run; None if it asks for nothing."""
        limits = []
        if self.of_floor is not None:
            limits.append(floor_ms / self.of_floor)
        if self.of_copy is not None:
            limits.append(self.of_copy * times["copy"])
        if self.copy_plus_us is not None:
            limits.append(times["copy"] + self.copy_plus_us / 1000)
        if self.of_compile is not None and "torch.compile" in times:
            limits.append(self.of_compile * times["torch.compile"])
        if self.of_linear is not None:
            limits.append(self.of_linear * times["linear alone"] + self.linear_plus_ms)
        return min(limits, default=None)

    def __str__(self) -> str:
        parts = []
        if self.of_floor is not None:
            parts.append(f"{self.of_floor:.0%} of floor")
        if self.of_copy is not None:
            parts.append(f"{self.of_copy:.2f}x copy")
        if self.copy_plus_us is not None:
            parts.append(f"copy + {self.copy_plus_us:.0f} us")
        if self.of_compile is not None:
            parts.append(f"{self.of_compile:.2f}x compile")
        if self.of_linear is not None:
            plus = f" + {self.linear_plus_ms:.2f} ms" if self.linear_plus_ms else ""
            parts.append(f"{self.of_linear:.2f}x Linear{plus}")
        return ", ".join(parts) or "-"


NO_TARGET = Target()


@dataclass(frozen=True)
class Workload:
    """A model, its input, and the bytes that must move: in a forward each input read and each output written once; with
    the backward also the gradient and the input read, and the input's gradient written."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    parameters: int = 0
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    precision: str = "highest"
    """torch.set_float32_matmul_precision"""
    training: bool = False
    backward: bool = False
    """Forward and backward, with gradients for the input and every parameter."""
    autocast: bool = False
    """Under bfloat16 autocast, where a norm gives float32; the parameters are float32."""
    weights: torch.dtype | None = None
    """Of the parameters, where they are of another dtype than the input."""
    shortcut: bool = False
    """Whether the model adds a tensor of the input's kind, its parameter `shortcut`, which is given to it."""
    passes: float | None = None
    """Over the input in all, where they are more than each tensor once."""
    target: Target = NO_TARGET
    tags: frozenset[str] = frozenset()
    """What `--benchmark` may name a set of rows by."""

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the parameters, and under autocast of the result too."""
        return self.weights or (torch.float32 if self.autocast else self.dtype)

    @property
    def floor_bytes(self) -> int:
        if self.passes is not None:
            return round(self.passes * self.dtype.itemsize * torch.Size(self.shape).numel())
        forward = self.dtype.itemsize + self.weights_dtype.itemsize
        each = 2 * forward + self.dtype.itemsize if self.backward else forward
        weights = self.weights_dtype.itemsize * self.parameters * (3 if self.backward else 1)
        return each * torch.Size(self.shape).numel() + weights

    @property
    def what(self) -> str:
        """Dtype and layout, in words."""
        words = [str(self.dtype).removeprefix("torch.")]
        words += ["channels_last"] * (self.memory_format is torch.channels_last)
        words += ["TF32"] * (self.precision == "high")
        words += ["autocast"] * self.autocast
        return ", ".join(words)

    @property
    def mode(self) -> str:
        """Of the model, or what is timed besides the forward."""
        return "forward + backward" if self.backward else "train" if self.training else "eval"

    @property
    def of_linear(self) -> bool:
        """Whether the floor is the Linear's own time in the same run."""
        return self.name == "linear_scale_batch_norm"

    @property
    def called(self) -> str:
        """What its row is called."""
        return f"{self.name} {'x'.join(map(str, self.shape))} {self.what} {self.mode}"

    def fits(self, pattern: str) -> bool:
        """Whether it is meant by one of its tags, or by a glob over what its row is called."""
        return pattern in self.tags or fnmatchcase(self.called, pattern) or fnmatchcase(self.called, f"*{pattern}*")


HEADLINE, COMMON = frozenset({"headline"}), frozenset({"common"})


def workloads(shrink: int = 1) -> list[Workload]:
    """The four, with the leading dimension divided by ``shrink``."""
    plane = (64, 256, 256)
    found = [
        Workload("l1_norm", L1Norm, (32768 // shrink, 65535), target=Target(of_floor=0.97)),
        Workload(
            "layer_norm",
            lambda: LayerNorm(plane),
            (max(1, 16 // shrink), *plane),
            2 * 64 * 256 * 256,
            target=Target(of_floor=0.75),
        ),
        Workload(
            "group_norm", lambda: GroupNorm(8, 64), (max(1, 112 // shrink), 64, 512, 512), target=Target(of_floor=0.94)
        ),
        *_linear_workloads(shrink),
    ]
    return [replace(one, tags=HEADLINE) for one in found]


def _linear_workloads(shrink: int) -> list[Workload]:
    """Linear -> scale -> BatchNorm in eval and in training."""
    f32, bf16 = torch.float32, torch.bfloat16
    forms = (  # dtype, matmul precision, so many times the Linear in eval, milliseconds beyond it in training
        (f32, "highest", 1.01, 0.28),
        (f32, "high", 1.04, 0.28),
        (bf16, "highest", 1.04, 0.15),
    )
    return [
        Workload(
            "linear_scale_batch_norm",
            lambda: LinearScaleBatchNorm(4096, 4096),
            (16384 // shrink, 4096),
            dtype=dtype,
            precision=precision,
            training=training,
            target=Target(of_linear=1.0, linear_plus_ms=plus) if training else Target(of_linear=factor),
        )
        for dtype, precision, factor, plus in forms
        for training in (False, True)
    ]


def common_workloads(shrink: int = 1) -> list[Workload]:
    """Sizes that models have."""
    return [replace(one, tags=COMMON) for one in (*_row_workloads(shrink), *_image_workloads(shrink))]


def _row_workloads(shrink: int) -> list[Workload]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    rows = (  # rows, columns, dtype, shares of the floor that layer_norm and rms_norm are to reach
        (16384, 768, f16, 0.96, 0.96),
        (50432, 768, bf16, 0.96, 0.96),
        (16384, 4096, bf16, 0.96, 0.96),
        (4096, 8192, bf16, 0.94, 0.94),
        (4096, 32768, bf16, 0.94, 0.96),
        (2048, 131072, bf16, 0.90, 0.95),
        (32768, 65536, f32, 0.96, 0.98),
        (1048576, 64, f32, 0.97, 0.97),
        (262144, 128, bf16, 0.93, 0.93),
        (16384, 1000, f16, 0.90, 0.90),
        (16384, 1001, f16, 0.83, 0.83),
        (32, 4096, bf16, None, None),
    )
    found = []
    for count, width, dtype, share, rms_share in rows:
        shape = (max(1, count // shrink), width)
        target, rms_target = (Target(of_floor=s) if s else Target(copy_plus_us=1.0) for s in (share, rms_share))
        make = lambda n=width: LayerNorm((n,))  # noqa: E731
        found.append(Workload("layer_norm", make, shape, 2 * width, dtype, target=target))
        make = lambda n=width: RMSNormByHand(n)  # noqa: E731
        found.append(Workload("rms_norm", make, shape, width, dtype, target=rms_target))
    return found


def _image_workloads(shrink: int) -> list[Workload]:
    f32, f16 = torch.float32, torch.float16
    small = Target(copy_plus_us=4.0)
    group_norm, with_silu = (lambda n: GroupNorm(32, n)), (lambda n: group_norm_silu(32, n))
    images = (  # name, model of so many channels, shape, dtype, targets as contiguous and as channels_last
        ("group_norm", group_norm, (8, 128, 512, 512), f16, (Target(of_floor=0.92), Target(of_floor=0.66))),
        ("group_norm + silu", with_silu, (8, 128, 512, 512), f16, (Target(of_floor=0.86), Target(of_floor=0.66))),
        ("group_norm", group_norm, (2, 320, 64, 64), f16, (small, small)),
        ("group_norm", group_norm, (64, 256, 56, 56), f32, (Target(of_copy=1.15),)),
        ("l1_norm over channels", lambda n: L1Norm(), (112, 64, 512, 512), f32, (NO_TARGET,)),
        ("rms_norm over channels", lambda n: ChannelRMSNorm(), (112, 64, 512, 512), f32, (Target(of_floor=0.92),)),
    )
    layouts = (torch.contiguous_format, torch.channels_last)
    return [
        Workload(
            name,
            lambda make=make, channels=image[1]: make(channels),
            (max(1, image[0] // shrink), *image[1:]),
            0,
            dtype,
            layout,
            target=target,
        )
        for name, make, image, dtype, targets in images
        for layout, target in zip(layouts, targets, strict=False)
    ]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, biases and running statistics: on fresh ones and zeros a norm that forgets them passes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, mean: float, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for module in model.modules():
            is_norm = "Norm" in type(module).__name__
            for parameter in module.parameters(recurse=False):
                normal(parameter, 1.0 if is_norm and parameter.dim() else 0.0, 0.2 if parameter.dim() < 2 else 0.02)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_mean is not None:
                normal(module.running_mean, 0.0, 0.5)
                module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model
