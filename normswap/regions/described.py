"""A region as data, and what its norm is given."""

from __future__ import annotations

import ast
from typing import Any

from normswap.kinds import KINDS
from normswap.regions.flow import Constant, Flow, Op
from normswap.regions.formula import Found, same
from normswap.regions.growing import FUNCTIONS, Growing
from normswap.regions.spec import Node, Position, Region, Step, slots
from normswap.regions.spelling import one_dim


def described(flow: Flow, found: Growing) -> Region:
    first = min(
        op.order for op in found.ops
    )  # in a branch that is not taken, a name may be read that holds no value here
    inside = any(op.conditional for op in found.ops)
    conditions = tuple((text, truth) for order, text, truth in flow.conditions if inside or order > first)
    start = flow.tree.lineno
    nodes, constants = _nodes(flow, found.expression, start)
    return Region(
        found.kind,
        found.norm,
        tuple(Step(does, _relative(op.node, start), operand, _is_method(op)) for does, op, operand in found.steps),
        found.type,
        {} if found.match is None else dict(found.match.attributes),
        found.shared,
        tuple(found.passes),
        found.activation,
        tuple(dict.fromkeys(conditions)),
        found.convolution,
        linear=found.linear,
        factor=found.factor,
        apart=found.apart,
        feeds=found.feeds,
        beside=found.beside,
        nodes=nodes,
        constants=constants,
    )


def _nodes(flow: Flow, found: Found, start: int) -> tuple[tuple[Node, ...], dict[str, Any]]:
    """The operations of an expression as data, and what it takes that the source names."""
    ops = sorted(found.ops, key=lambda op: op.order)
    places = {id(op): index for index, op in enumerate(ops)}
    constants = {
        name: one_dim(value.value) if name == "dim" else value.value
        for name, value in found.values.items()
        if isinstance(value, Constant)
    }
    nodes: list[Node] = []
    for op in ops:
        operands: list[int | str] = []
        for value, written in zip((*op.args, *op.keywords.values()), slots(op.node, _is_method(op)), strict=True):
            if isinstance(value, Constant) and not any(
                isinstance(n, ast.Name) and n.id in flow.locals for n in ast.walk(written)
            ):
                operands.append("")
            elif id(value) in places:
                operands.append(places[id(value)])
            else:
                given = f"given_{len(nodes)}_{len(operands)}"
                operands.append(next((n for n, v in found.values.items() if v is value or same(v, value)), given))
                if isinstance(value, Constant):
                    constants.setdefault(str(operands[-1]), value.value)
        nodes.append(Node(_relative(op.node, start), tuple(operands), _is_method(op)))
    return tuple(nodes), constants


def parameters_of(region: Region) -> tuple[str, ...]:
    """What the norm of ``region`` takes behind its input, in order; nothing where it is a child."""
    if region.type:
        return ()
    kind = KINDS.get(region.kind)
    return kind.parameters if kind is not None else dict(FUNCTIONS.values())[region.kind]


def _relative(node: Any, start: int) -> Position:
    return node.lineno - start, node.col_offset, node.end_lineno - start, node.end_col_offset


def _is_method(op: Op) -> bool:
    return isinstance(op.target, str) and op.target.startswith(".")


def others_of(region: Region) -> list[str]:
    """What else an expression is given: what it casts to."""
    names = {operand for node in region.nodes for operand in node.operands if isinstance(operand, str)}
    return sorted(names - {"x", "", *parameters_of(region)}) if region.kind in KINDS else []
