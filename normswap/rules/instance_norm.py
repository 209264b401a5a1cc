"""torch.nn.InstanceNorm1d, 2d and 3d as modules of their own, where they keep no running statistics."""

from __future__ import annotations

from typing import Any

from normswap.plan import Match, Reason, Refusal
from normswap.rules.module_site import match_any

KIND = "instance_norm"


def match(module: Any) -> Match | Refusal | None:
    """Match exactly these classes; refuse subclasses and disguises with the reason, and one that goes by the input in
    training and by running statistics in eval."""
    answer = match_any(module, KIND)
    if isinstance(answer, Match) and (module.track_running_stats or module.running_mean is not None):
        return Refusal(KIND, Reason.UNSUPPORTED, "it keeps running statistics")
    return answer
