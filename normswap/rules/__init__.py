"""What can be swapped, asked in that order: what a person has registered, a class of torch.nn alone, a whole forward
written out, a region of one."""

from __future__ import annotations

from torch import nn

from normswap.kinds import KINDS, NORMS
from normswap.plans import Match, Reason, Refusal
from normswap.rules import l1_norm, linear, region, registered, rms_by_hand
from normswap.rules.module_site import match_norm
from normswap.rules.own_class import why_itself
from normswap.untouched import is_sharded

_MORE = (Reason.SUBCLASS, Reason.PART_OF_FORWARD, Reason.NOT_STRAIGHT_LINE, Reason.UNSUPPORTED, Reason.CHILD)
"""Why a module is refused whose forward may hold a region all the same."""


def find(module: nn.Module, undecided: bool = False) -> Match | Refusal | None:
    """What ``module`` is a site of: what a person has registered, the first rule's answer, or a region of its forward,
    also where it is a norm's subclass that computes more, or computes more than an expression. ``undecided``: see
    ``region.match``."""
    answer = alone(module)
    if answer is None or (isinstance(answer, Refusal) and answer.reason in _MORE):
        within = region.match(module, alone, undecided)
        answer = within if answer is None or _says_more(module, within, answer) else answer
        answer = answer or linear.why_apart(module, alone)
    if isinstance(answer, Match) and is_sharded(module):
        return Refusal(answer.kind, Reason.SHARDED)
    if isinstance(answer, Match) and (why := why_itself(module)):
        return Refusal(answer.kind, Reason.OWN_CLASS, why)
    return answer


def _says_more(module: nn.Module, within: Match | Refusal | None, refusal: Refusal) -> bool:
    """Whether a region that was found outdoes a refusal: of an expression, one that holds an expression. What a person
    has registered is refused with its own reason."""
    if not isinstance(within, Match) or registered.match(module) is not None:
        return False
    if refusal.reason is Reason.SUBCLASS:
        return True
    return any(found["kind"] in KINDS for found in within.attributes["regions"])


def alone(module: nn.Module) -> Match | Refusal | None:
    """The answer for ``module`` as a whole."""
    answer = registered.match(module)
    for norm in NORMS.values():
        answer = answer or match_norm(module, norm)
    if answer is None or (isinstance(answer, Refusal) and answer.reason is Reason.SUBCLASS):
        written = (rule.match(module) for rule in (rms_by_hand, l1_norm))
        return next((found for found in written if found is not None), answer)
    return answer
