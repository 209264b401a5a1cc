"""InstanceNorm over each channel, without running statistics."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm


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
    takes=("weight", "bias", "eps"),
    ignores=("momentum",),
    sample=sample,
)
