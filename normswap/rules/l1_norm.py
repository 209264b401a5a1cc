"""A module whose whole forward is ``x / torch.mean(torch.abs(x), dim=d, keepdim=True)``, in any spelling, or that with
``+ eps`` or ``.clamp(min=eps)`` under the line; the numbers literal or attributes of self."""

from __future__ import annotations

import ast

from torch import nn

from normswap.plans import Match, Refusal
from normswap.rules.expression_site import ABS, DIVISION, Flow, class_forward, flow_of, names_in, not_rewritable
from normswap.rules.whole_forward import NotTheNorm, Whole, judged

KIND = "l1_norm"

_RANK = 6


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is the L1 norm and nothing else; refuse one that holds it in another form."""
    forward = class_forward(module)
    if forward is None or "mean" not in names_in(forward) or not names_in(forward) & ABS:
        return None
    if (flow := flow_of(forward)) is not None and not _looks_like(flow):
        return None
    return not_rewritable(module, KIND) or judged(module, [forward], KIND, KIND, _form)


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


def _form(module: nn.Module, whole: Whole) -> Match:
    if whole.read.tested or whole.read.called:
        raise NotTheNorm("forward branches, or calls functions of its own")
    numbers = {name: value for name, value in whole.plain.items() if type(value) in (int, float)}
    found = {name: whole.number(name, numbers) for name in ("dim", "eps", "minimum")}
    attributes = {name: value for name, value in found.items() if value is not None}
    if type(dim := found["dim"]) is int and not -_RANK <= dim < _RANK:
        raise NotTheNorm(f"mean over dim={dim}")
    if others := {*whole.tensors, *whole.plain} - {*attributes.values()}:
        raise NotTheNorm(f"forward reads self.{', self.'.join(sorted(others))} in another way")
    return Match(KIND, attributes)
