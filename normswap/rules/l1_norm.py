"""A module whose whole forward is ``x / torch.mean(torch.abs(x), dim=d, keepdim=True)``, in any spelling, or that with
``+ eps`` or ``.clamp(min=eps)`` under the line; the numbers literal or attributes of self."""

from __future__ import annotations

import ast
import types
import weakref
from collections.abc import Hashable
from typing import TypeAlias

from torch import nn

from normswap.attributes import own_getattr
from normswap.plans import Match, Reason, Refusal
from normswap.regions.straight import plain_value
from normswap.rules.expression_site import (
    ABS,
    DIVISION,
    Flow,
    class_forward,
    flow_of,
    names_in,
    not_rewritable,
)
from normswap.rules.whole_forward import NotTheNorm, read_whole

KIND = "l1_norm"

_RANK = 6

# The forward decides, and what kind of number each attribute is that it reads. The code is kept to notice another one.
_Verdicts: TypeAlias = "dict[Hashable, Match | Refusal | None]"
_judged: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, _Verdicts]]
_judged = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is the L1 norm and nothing else; refuse one that holds it in another form."""
    forward = class_forward(module)
    if forward is None or "mean" not in names_in(forward) or not names_in(forward) & ABS:
        return None
    known = _judged.get(forward)
    if known is None or known[0] is not forward.__code__:
        known = _judged[forward] = (forward.__code__, {})
    verdicts, key = known[1], _kinds(module, forward)
    if key not in verdicts:
        verdicts[key] = _judge(module, forward) if (flow := flow_of(forward)) is None or _looks_like(flow) else None
    verdict = verdicts[key]
    return verdict and (not_rewritable(module, KIND) or verdict)


def _kinds(module: nn.Module, forward: types.FunctionType) -> Hashable:
    """All of ``module`` that the verdict on its forward depends on."""
    values = ((name, plain_value(module, name)) for name in sorted(names_in(forward)))
    return own_getattr(module) is None, tuple((name, type(value)) for name, value in values)


def _looks_like(flow: Flow) -> bool:
    """True when something is divided by what a mean of an absolute value flows into."""
    return any(
        any(True for _ in flow.calls(ABS, mean))
        for divisor in _divisors(flow)
        for mean in flow.calls(frozenset({"mean"}), divisor)
    )


def _divisors(flow: Flow) -> list[ast.AST]:
    operators = [n.right for n in flow.nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    in_place = [n.value for n in flow.nodes if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Div)]
    calls = list(flow.calls(DIVISION | {"div_"}, *flow.nodes[:1]))
    return [*operators, *in_place, *(argument for call in calls for argument in (*call.args, *call.keywords))]


def _judge(module: nn.Module, forward: types.FunctionType) -> Match | Refusal:
    whole = read_whole(module, forward, KIND, KIND)
    if isinstance(whole, Refusal):
        return whole
    if whole.read.tested or whole.read.called:
        return Refusal(KIND, Reason.UNSUPPORTED, "forward branches, or calls functions of its own")
    numbers = {name: value for name, value in whole.plain.items() if type(value) in (int, float)}
    try:
        found = {name: whole.number(name, numbers) for name in ("dim", "eps", "minimum")}
    except NotTheNorm as difference:
        return Refusal(KIND, difference.reason, str(difference))
    attributes = {name: value for name, value in found.items() if value is not None}
    if type(dim := found["dim"]) is int and not -_RANK <= dim < _RANK:
        return Refusal(KIND, Reason.UNSUPPORTED, f"mean over dim={dim}")
    if others := {*whole.tensors, *whole.plain} - {*attributes.values()}:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(sorted(others))} in another way")
    return Match(KIND, attributes)
