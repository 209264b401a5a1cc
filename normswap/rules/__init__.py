"""What can be swapped, asked in that order: a class of torch.nn alone, or a file with a KIND and a ``match``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from normswap.kinds import KINDS
from normswap.plan import Match, Reason, Refusal
from normswap.rules import batch_norm, instance_norm, l1_norm, linear_scale_batch_norm, region, registered, rms_norm
from normswap.rules.module_site import match_any
from normswap.sites import is_sharded

_MORE = (Reason.SUBCLASS, Reason.PART_OF_FORWARD, Reason.NOT_STRAIGHT_LINE, Reason.UNSUPPORTED, Reason.CHILD)
"""Why a module is refused whose forward may hold a region all the same."""


@dataclass(frozen=True)
class Rule:
    """One kind, and the question whether a module is a site of it: a Match, a Refusal with the reason, or None."""

    kind: str
    match: Callable[[nn.Module], Match | Refusal | None]


RULES: tuple[Rule, ...] = (
    *(Rule(kind, partial(match_any, kind=kind)) for kind in ("layer_norm", "group_norm")),
    *(Rule(rule.KIND, rule.match) for rule in (instance_norm, batch_norm, rms_norm, l1_norm, linear_scale_batch_norm)),
)


def find(module: nn.Module, undecided: bool = False) -> Match | Refusal | None:
    """What ``module`` is a site of: what a person has registered, the first rule's answer, or a region of its forward,
    also where it is a norm's subclass that computes more, or computes more than an expression. ``undecided``: see
    ``region.match``."""
    answer = alone(module)
    if answer is None or (isinstance(answer, Refusal) and answer.reason in _MORE):
        within = region.match(module, alone, undecided)
        answer = within if answer is None or _says_more(module, within, answer) else answer
    sharded = isinstance(answer, Match) and is_sharded(module)
    return Refusal(answer.kind, Reason.SHARDED) if answer is not None and sharded else answer


def _says_more(module: nn.Module, within: Match | Refusal | None, refusal: Refusal) -> bool:
    """Whether a region that was found outdoes a refusal: of an expression, one that holds an expression. What a person
    has registered is refused with its own reason."""
    if not isinstance(within, Match) or registered.match(module) is not None:
        return False
    return refusal.reason is Reason.SUBCLASS or any(found["kind"] in KINDS for found in within.attributes["regions"])


def alone(module: nn.Module) -> Match | Refusal | None:
    """The answer for ``module`` as a whole."""
    declared = registered.match(module)
    if declared is not None:
        return declared
    for rule in RULES:
        answer = rule.match(module)
        if answer is not None:
            return answer
    return None
