"""What is measured: the four models the kernels exist for, written as a user would write them, common ones, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
class Workload:
    """A model, its input, and the bytes a pass must move: each input read once, each output written once."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    parameters: int = 0
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    precision: str = "highest"
    """torch.set_float32_matmul_precision"""
    training: bool = False
    target_ms: float | None = None
    """On an H100."""
    of_linear: tuple[float, float] | None = None
    """The target where the floor is a Linear's own time in the same run: so many times that, plus milliseconds."""

    @property
    def floor_bytes(self) -> int:
        return self.dtype.itemsize * (2 * torch.Size(self.shape).numel() + self.parameters)

    @property
    def what(self) -> str:
        """Dtype and layout, in words."""
        words = [str(self.dtype).removeprefix("torch.")]
        words += ["channels_last"] * (self.memory_format is torch.channels_last)
        words += ["TF32"] * (self.precision == "high")
        return ", ".join(words)

    def target(self, linear_ms: float | None) -> float | None:
        """Milliseconds; ``linear_ms``: the Linear's own time, where there is one."""
        if self.of_linear is None or linear_ms is None:
            return self.target_ms
        factor, plus = self.of_linear
        return factor * linear_ms + plus


def workloads(shrink: int = 1) -> list[Workload]:
    """The four, with the leading dimension divided by ``shrink``."""
    plane = (64, 256, 256)
    return [
        Workload("l1_norm", L1Norm, (32768 // shrink, 65535), target_ms=6.1),
        Workload(
            "layer_norm",
            lambda: LayerNorm(plane),
            (max(1, 16 // shrink), *plane),
            2 * 64 * 256 * 256,
            target_ms=0.26,
        ),
        Workload("group_norm", lambda: GroupNorm(8, 64), (max(1, 112 // shrink), 64, 512, 512), target_ms=5.6),
        *_linear_workloads(shrink),
    ]


def _linear_workloads(shrink: int) -> list[Workload]:
    """Linear -> scale -> BatchNorm in eval and in training."""
    f32, bf16 = torch.float32, torch.bfloat16
    forms = (  # dtype, matmul precision, targets in eval and in training
        (f32, "highest", (1.01, 0.0), (1.0, 0.28)),
        (f32, "high", (1.04, 0.0), (1.0, 0.28)),
        (bf16, "highest", (1.04, 0.0), (1.0, 0.15)),
    )
    return [
        Workload(
            "linear_scale_batch_norm",
            lambda: LinearScaleBatchNorm(4096, 4096),
            (16384 // shrink, 4096),
            dtype=dtype,
            precision=precision,
            training=training,
            of_linear=target,
        )
        for dtype, precision, *targets in forms
        for training, target in zip((False, True), targets, strict=True)
    ]


def common_workloads(shrink: int = 1) -> list[Workload]:
    """Sizes that models have."""
    return [*_row_workloads(shrink), *_image_workloads(shrink)]


def _row_workloads(shrink: int) -> list[Workload]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    rows = (  # rows, columns, dtype, targets of layer_norm and rms_norm
        (16384, 768, f16, 0.0172, 0.0163),
        (50432, 768, bf16, 0.0535, 0.0533),
        (16384, 4096, bf16, 0.091, 0.0887),
        (4096, 8192, bf16, 0.0460, 0.0441),
        (4096, 32768, bf16, 0.184, 0.181),
        (2048, 131072, bf16, 0.370, 0.359),
        (32768, 65536, f32, 5.80, 5.70),
        (1048576, 64, f32, 0.182, 0.180),
        (262144, 128, bf16, 0.0467, 0.0467),
        (16384, 1000, f16, 0.0240, 0.0238),
        (16384, 1001, f16, 0.026, None),
        (32, 4096, bf16, 0.0024, 0.0021),
    )
    found = []
    for count, width, dtype, target, rms_target in rows:
        shape = (max(1, count // shrink), width)
        make = lambda n=width: LayerNorm((n,))  # noqa: E731
        found.append(Workload("layer_norm", make, shape, 2 * width, dtype, target_ms=target))
        make = lambda n=width: RMSNormByHand(n)  # noqa: E731
        found.append(Workload("rms_norm", make, shape, width, dtype, target_ms=rms_target))
    return found


def _image_workloads(shrink: int) -> list[Workload]:
    f32, f16 = torch.float32, torch.float16
    images = (  # what, shape, dtype, targets as contiguous and as channels_last
        (("group_norm", lambda n: GroupNorm(32, n)), (8, 128, 512, 512), f16, (0.42, 0.56)),
        (("group_norm + silu", lambda n: group_norm_silu(32, n)), (8, 128, 512, 512), f16, (0.42, 0.56)),
        (("group_norm", lambda n: GroupNorm(32, n)), (2, 320, 64, 64), f16, (0.012, 0.012)),
        (("group_norm", lambda n: GroupNorm(32, n)), (64, 256, 56, 56), f32, (0.16,)),
        (("l1_norm over channels", lambda n: L1Norm()), (112, 64, 512, 512), f32, (None,)),
        (("rms_norm over channels", lambda n: ChannelRMSNorm()), (112, 64, 512, 512), f32, (5.41,)),
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
            target_ms=target,
        )
        for (name, make), image, dtype, targets in images
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
