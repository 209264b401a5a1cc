"""torch.nn.BatchNorm1d, 2d and 3d in training as modules of their own."""

from __future__ import annotations

from torch import nn

from normswap.plan import Match, Refusal
from normswap.rules.module_site import match_any

KIND = "batch_norm"


def match(module: nn.Module) -> Match | Refusal | None:
    """Match exactly these classes in train mode; refuse subclasses and disguises with the reason. In eval PyTorch's op,
    one pass, is as fast, and what stands behind it is a region's."""
    answer = match_any(module, KIND)  # before the mode, which a frozen ScriptModule has none of
    return answer if answer is not None and module.training else None
