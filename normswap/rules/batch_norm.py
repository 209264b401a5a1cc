"""torch.nn.BatchNorm1d, 2d and 3d in training as modules of their own."""

from __future__ import annotations

from torch import nn

from normswap.forwards.batch_norm import RANKS
from normswap.plan import Match, Reason, Refusal
from normswap.rules.module_site import is_lazy, match_exact, settled_type

KIND = "batch_norm"


def match(module: nn.Module) -> Match | Refusal | None:
    """Match exactly these classes in train mode; refuse subclasses and disguises with the reason. In eval PyTorch's op,
    one pass, is as fast, and what stands behind it is a region's."""
    if is_lazy(module) and settled_type(module) in RANKS:
        answer: Match | Refusal | None = Refusal(KIND, Reason.LAZY)
    else:
        answer = next((found for cls in RANKS if (found := match_exact(module, cls, KIND)) is not None), None)
    return answer if answer is not None and module.training else None
