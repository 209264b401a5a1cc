"""A module whose whole forward is ``x / torch.mean(torch.abs(x), dim=d, keepdim=True)``, in any spelling, or that with
``+ eps`` or ``.clamp(min=eps)`` under the line; the numbers literal or attributes of self."""

from __future__ import annotations

import ast
import types
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeAlias

import torch
from torch import fx, nn

from normswap import source, tracing
from normswap.plan import Match, Reason, Refusal
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
from normswap.rules.live_numbers import name_or_number, numbers_of

KIND = "l1_norm"

_PATTERN = Counter(["abs", "mean", "/", "+", "clamp"])
_CLAMP = frozenset({"clamp", "clamp_min", "clip"})
_CANONICAL = {**dict.fromkeys(DIVISION, "/"), **dict.fromkeys(ABS, "abs"), **dict.fromkeys(_CLAMP, "clamp"), "add": "+"}

_RANK = 6
_aten = torch.ops.aten
_VARIANTS: dict[object, str] = {
    _aten.add.Tensor: "eps",
    _aten.clamp.default: "minimum",
    _aten.clip.default: "minimum",
    _aten.clamp_min.default: "minimum",
}

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
        verdicts[key] = _judge(module, forward) if recognised_in(forward, _looks_like) else None
    verdict = verdicts[key]
    return verdict and (not_rewritable(module, KIND) or verdict)


def _kinds(module: nn.Module, forward: types.FunctionType) -> Hashable:
    """All of ``module`` that the verdict on its forward depends on."""
    numbers = numbers_of(module, sorted(names_in(forward)))
    return tracing.own_getattr(module) is None, tuple((name, type(value)) for name, value in numbers.items())


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
        return Refusal(KIND, Reason.PART_OF_FORWARD, f"besides abs, mean and /, forward does {', '.join(extra)}")
    numbers = numbers_of(module, scanned.reads)
    if others := [name for name in scanned.reads if name not in numbers]:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(others)}")
    if scanned.reads and (rejection := tracing.own_getattr(module)) is not None:
        return Refusal(KIND, rejection.reason, rejection.detail)
    train, evaluation = (_judge_trace(module, numbers, training) for training in (True, False))
    if train != evaluation and isinstance(train, Match) and isinstance(evaluation, Match):
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(numbers)} in another way")
    return next((answer for answer in (train, evaluation) if isinstance(answer, Refusal)), train)


def _judge_trace(module: nn.Module, numbers: Mapping[str, int | float], training: bool) -> Match | Refusal:
    # The scan has no operation that could ask for a shape, so one rank speaks for all; equal sizes let a forward
    # without keepdim run, so that it is refused for that. Other values in each mode: a number that the source says
    # literally is then not taken for an attribute's.
    values = {
        name: (2 if training else 3) + 2 * index if type(value) is int else (0.734375 if training else 1.390625) + index
        for index, (name, value) in enumerate(numbers.items())
    }
    traced = tracing.trace(module, (), (3,) * _RANK, training=training, values=values)
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    steps = _steps_of_l1_norm(traced)
    if steps is None:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward computes another function: {_targets(traced)}")
    mean, variant = steps
    dims, keepdim = mean.args[1], len(mean.args) > 2 and mean.args[2]
    if not (isinstance(dims, (list, tuple)) and len(dims) == 1 and keepdim and not mean.kwargs):
        detail = f"mean over dim={dims}, keepdim={bool(keepdim)}{', dtype given' if mean.kwargs else ''}"
        return Refusal(KIND, Reason.UNSUPPORTED, f"{detail}; only one dim with keepdim=True is swapped")
    found = {"dim": name_or_number(dims[0], values)}
    if variant is not None:
        found[_VARIANTS[variant.target]] = name_or_number(variant.args[1], values)
    if None in found.values() or {*numbers} - {*found.values()}:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(numbers)} in another way")
    return Match(KIND, found)


def _steps_of_l1_norm(traced: tracing.Traced) -> tuple[fx.Node, fx.Node | None] | None:
    """(mean, what is added to it or clamps it) of a graph that is exactly ``argument / mean(abs(argument), ...)`` or
    that with one such step under the line; None for any other graph."""
    nodes = traced.operations
    if len(nodes) not in (3, 4) or nodes[0].target is not _aten.abs.default or nodes[1].target is not _aten.mean.dim:
        return None
    magnitude, mean, *variants, quotient = nodes
    x, divisor = traced.argument, nodes[-2]
    variant = variants[0] if variants else None
    if variant is not None and not (
        variant.target in _VARIANTS
        and variant.args[0] is mean
        and (len(variant.args) == 2 or variant.args[2:] == (None,))
        and not variant.kwargs
    ):
        return None
    exact = (
        magnitude.args == (x,)
        and mean.args[0] is magnitude
        and quotient.target is _aten.div.Tensor
        and quotient.args == (x, divisor)
        and not quotient.kwargs
        and traced.result is quotient
    )
    return (mean, variant) if exact and all(len(node.users) == 1 for node in nodes) else None


def _targets(traced: tracing.Traced) -> str:
    return ", ".join(str(node.target) for node in traced.operations)
