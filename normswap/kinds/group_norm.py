"""GroupNorm over groups of channels."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm


def sample(norm: Any) -> tuple[int, ...]:
    channels = getattr(norm, "num_channels", None)  # of a class; a call has none
    if channels is None:
        channels = 3 * norm.num_groups if norm.weight is None else norm.weight.numel()
    return (2, channels, 6, 5)


NORM = Norm(
    "group_norm",
    (nn.GroupNorm,),
    F.group_norm,
    ("num_groups", "weight=None", "bias=None", "eps=1e-5"),
    reads=("num_groups", "num_channels", "weight", "bias", "eps"),
    widens=True,
    sample=sample,
)
