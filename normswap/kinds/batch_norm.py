"""BatchNorm over each channel of a batch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm


def sample(norm: Any) -> tuple[int, ...]:
    if isinstance(norm, nn.Module):
        rank = next(rank for rank, cls in enumerate(NORM.classes, 1) if isinstance(norm, cls))
        return (3, norm.num_features, *(5, 4, 3)[:rank])  # type: ignore[arg-type]
    return (3, next((t.numel() for t in (norm.running_mean, norm.weight) if t is not None), 5), 5, 4)


NORM = Norm(
    "batch_norm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    F.batch_norm,
    ("running_mean", "running_var", "weight=None", "bias=None", "training=False", "momentum=0.1", "eps=1e-5"),
    sample=sample,
)
