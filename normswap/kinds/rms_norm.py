"""RMSNorm over the last dims."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm

NORM = Norm(
    "rms_norm",
    (nn.RMSNorm,),
    F.rms_norm,
    ("normalized_shape", "weight=None", "eps=None"),
    reads=("normalized_shape", "weight", "eps"),
    rows=True,
)
