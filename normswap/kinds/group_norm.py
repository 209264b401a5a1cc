"""GroupNorm over groups of channels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm

NORM = Norm(
    "group_norm",
    (nn.GroupNorm,),
    F.group_norm,
    ("num_groups", "weight=None", "bias=None", "eps=1e-5"),
    reads=("num_groups", "num_channels", "weight", "bias", "eps"),
    widens=True,
)
