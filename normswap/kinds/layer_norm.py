"""LayerNorm over the last dims."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from normswap.kinds.norm import Norm

NORM = Norm(
    "layer_norm",
    (nn.LayerNorm,),
    F.layer_norm,
    ("normalized_shape", "weight=None", "bias=None", "eps=1e-5"),
    reads=("normalized_shape", "weight", "bias", "eps"),
    rows=True,
    widens=True,
)
