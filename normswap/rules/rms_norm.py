"""torch.nn.RMSNorm as a module of its own."""

from __future__ import annotations

from torch import nn

from normswap.plan import Match, Refusal
from normswap.rules.module_site import match_exact

KIND = "rms_norm"


def match(module: nn.Module) -> Match | Refusal | None:
    """Match exactly nn.RMSNorm; refuse its subclasses and disguises with the reason."""
    return match_exact(module, nn.RMSNorm, KIND)
