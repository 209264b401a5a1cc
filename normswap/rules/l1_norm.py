"""A module whose whole forward is ``x / torch.mean(torch.abs(x), dim=d, keepdim=True)``, in any spelling."""

from __future__ import annotations

import ast
import types
import weakref
from collections import Counter

import torch
from torch import fx, nn

from normswap import tracing
from normswap.plan import Match, Reason, Refusal
from normswap.rules import source
from normswap.rules.expression_site import (
    ABS,
    DIVISION,
    Flow,
    besides,
    class_forward,
    names_in,
    not_rewritable,
    recognised_in,
)

KIND = "l1_norm"

_PATTERN = Counter(["abs", "mean", "/"])
_CANONICAL = {**dict.fromkeys(DIVISION, "/"), **dict.fromkeys(ABS, "abs")}
_GUARDS = frozenset({"+", "add", "clamp", "clamp_min", "clip", "maximum"})
"""What guards a division by zero: a form of this norm that is not supported."""

_RANK = 6
_aten = torch.ops.aten

# No attribute of the module is read, so the forward alone decides. The code is kept to notice another one.
_judged: weakref.WeakKeyDictionary[types.FunctionType, tuple[types.CodeType, Match | Refusal | None]]
_judged = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is the L1 norm and nothing else; refuse one that holds it in another form."""
    forward = class_forward(module)
    if forward is None or "mean" not in names_in(forward) or not names_in(forward) & ABS:
        return None
    known = _judged.get(forward)
    if known is None or known[0] is not forward.__code__:
        verdict = _judge(module, forward) if recognised_in(forward, _looks_like) else None
        known = _judged[forward] = (forward.__code__, verdict)
    return known[1] and (not_rewritable(module, KIND) or known[1])


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
    scanned = source.scan(forward)
    if isinstance(scanned, tracing.Rejection):
        return Refusal(KIND, scanned.reason, scanned.detail)
    if extra := besides(scanned, _PATTERN, _CANONICAL):
        reason = Reason.UNSUPPORTED if _GUARDS.issuperset(extra) else Reason.PART_OF_FORWARD
        return Refusal(KIND, reason, f"besides abs, mean and /, forward does {', '.join(extra)}")
    if scanned.reads:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(scanned.reads)}")
    answers = [_judge_trace(module, scanned, training) for training in (True, False)]
    return next((answer for answer in answers if isinstance(answer, Refusal)), answers[0])


def _judge_trace(module: nn.Module, scanned: source.Scan, training: bool) -> Match | Refusal:
    # The scan has no operation that could ask for a shape, so one rank speaks for all; equal sizes let a forward
    # without keepdim run, so that it is refused for that.
    traced = tracing.trace(module, scanned.reads, (3,) * _RANK, training=training)
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    mean = _mean_of_l1_norm(traced)
    if mean is None:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward computes another function: {_targets(traced)}")
    dims, keepdim = mean.args[1], len(mean.args) > 2 and mean.args[2]
    if not (isinstance(dims, (list, tuple)) and len(dims) == 1 and keepdim and not mean.kwargs):
        detail = f"mean over dim={dims}, keepdim={bool(keepdim)}{', dtype given' if mean.kwargs else ''}"
        return Refusal(KIND, Reason.UNSUPPORTED, f"{detail}; only one dim with keepdim=True is swapped")
    return Match(KIND, {"dim": dims[0]})


def _mean_of_l1_norm(traced: tracing.Traced) -> fx.Node | None:
    """The mean of a graph that is exactly ``argument / mean(abs(argument), ...)``; None for any other graph."""
    nodes = traced.operations
    if [node.target for node in nodes] != [_aten.abs.default, _aten.mean.dim, _aten.div.Tensor]:
        return None
    magnitude, mean, quotient = nodes
    x = traced.argument
    exact = (
        magnitude.args == (x,)
        and mean.args[0] is magnitude
        and quotient.args == (x, mean)
        and not quotient.kwargs
        and traced.result is quotient
    )
    return mean if exact and all(len(node.users) == 1 for node in nodes) else None


def _targets(traced: tracing.Traced) -> str:
    return ", ".join(str(node.target) for node in traced.operations)
