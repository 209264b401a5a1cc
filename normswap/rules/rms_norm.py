"""torch.nn.RMSNorm as a module of its own, and RMSNorms written by hand."""

from __future__ import annotations

from torch import nn

from normswap.plan import Match, Reason, Refusal
from normswap.rules import rms_by_hand
from normswap.rules.module_site import match_any

KIND = "rms_norm"


def match(module: nn.Module) -> Match | Refusal | None:
    """Match nn.RMSNorm, and a module whose forward is an RMSNorm written by hand; refuse their disguises with the
    reason."""
    answer = match_any(module, KIND)
    if answer is None or (isinstance(answer, Refusal) and answer.reason is Reason.SUBCLASS):
        return rms_by_hand.match(module) or answer
    return answer
