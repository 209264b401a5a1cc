"""InstanceNorm over each channel, without running statistics."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import Activation
from normswap.criterion import Magnitudes, Rows
from normswap.forwards import affine_of
from normswap.kinds.norm import Norm, is_alike
from normswap.norms import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d


def arguments(norm: Any, x: Tensor) -> tuple[Any, ...] | None:
    batched = x.dim() == norm._get_no_batch_dim() + 1 and x.shape[1] == norm.num_features
    return None if alone(norm) or not batched else (*affine_of(norm), norm.eps)


def fused(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    weight, bias, eps = given
    return ops.instance_norm(x, weight, bias, eps, activation, residual=behind) if is_alike(x, behind) else None


def magnitudes(norm: Any, x: Tensor) -> Magnitudes:
    channel = x.dim() - norm._get_no_batch_dim()
    return Rows(norm, x, groups=x.shape[channel], channel=channel).magnitudes()


def alone(norm: Any) -> str:
    return "it keeps running statistics" if norm.track_running_stats or norm.running_mean is not None else ""


def sample(norm: Any) -> tuple[int, ...]:
    if isinstance(norm, nn.Module):
        return (2, norm.num_features, *(6, 5, 4)[: norm._get_no_batch_dim() - 1])  # type: ignore[operator, arg-type]
    return (2, 5 if norm.weight is None else norm.weight.numel(), 6, 5)


NORM = Norm(
    "instance_norm",
    (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    F.instance_norm,
    (
        "running_mean=None",
        "running_var=None",
        "weight=None",
        "bias=None",
        "use_input_stats=True",
        "momentum=0.1",
        "eps=1e-5",
    ),
    arguments,
    fused,
    magnitudes,
    (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d),
    takes=("weight", "bias", "eps"),
    ignores=("momentum",),
    alone=alone,
    sample=sample,
)
