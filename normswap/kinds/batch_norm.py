"""BatchNorm over each channel of a batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm

NORM = Norm(
    "batch_norm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    F.batch_norm,
    ("running_mean", "running_var", "weight=None", "bias=None", "training=False", "momentum=0.1", "eps=1e-5"),
)
