"""InstanceNorm over each channel, without running statistics."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm

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
)
