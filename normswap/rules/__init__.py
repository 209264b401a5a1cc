"""What can be swapped: one file per kind, each with a KIND and a ``match``; ``find`` asks them in that order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from normswap.plan import Match, Reason, Refusal
from normswap.rules import (
    group_norm,
    group_norm_activation,
    instance_norm,
    l1_norm,
    layer_norm,
    linear_scale_batch_norm,
    registered,
    rms_norm,
)
from normswap.sites import is_sharded


@dataclass(frozen=True)
class Rule:
    """One kind, and the question whether a module is a site of it: a Match, a Refusal with the reason, or None."""

    kind: str
    match: Callable[[nn.Module], Match | Refusal | None]


RULES: tuple[Rule, ...] = tuple(
    Rule(rule.KIND, rule.match)
    for rule in (
        layer_norm,
        group_norm,
        instance_norm,
        rms_norm,
        l1_norm,
        linear_scale_batch_norm,
        group_norm_activation,
    )
)


def find(module: nn.Module) -> Match | Refusal | None:
    """The first rule's answer that is not None; what a person has registered goes before."""
    for match in (registered.match, *(rule.match for rule in RULES)):
        answer = match(module)
        if answer is not None:
            sharded = isinstance(answer, Match) and is_sharded(module)
            return Refusal(answer.kind, Reason.SHARDED) if sharded else answer
    return None
