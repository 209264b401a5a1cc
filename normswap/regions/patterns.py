"""The regions of a forward: a norm, the sum before it, and the residual, scale and shift or activation behind it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from normswap.forwards.plain import calls_forward
from normswap.kinds import NORMS
from normswap.ops.at_once import PASSING
from normswap.regions.activations import CHILDREN
from normswap.regions.flow import Constant, Flow, Op
from normswap.regions.formula import FORMULAS, Formula, Found, same
from normswap.regions.growing import (
    CHANNELS,
    ROWS,
    Growing,
    child_called,
    child_of,
    fed_by,
    grow_behind,
    with_convolution,
    with_sum,
)
from normswap.regions.linear import with_linear
from normswap.regions.moving import beside_of, only_computes_between
from normswap.regions.spec import Node, Region, Step, qualified
from normswap.regions.spelling import SPELLED, one_dim
from normswap.regions.syntax import place_of, slots

_CALLED = {norm.name: Formula(norm.formula) for norm in NORMS.values()}
_Stands = Callable[[Growing], bool]

NAMES = frozenset({"mean", "norm", "vector_norm", "normalize", "var", *_CALLED})
"""A forward that names none of these computes no norm itself."""


def regions_of(module: nn.Module, flow: Flow, norm_of: Any, baked: bool = False) -> Iterator[Region]:
    """Every region of ``flow``, a reading of the forward of ``module``, none within another. ``norm_of(child)`` is the
    Match of a child that is a norm, else None. ``baked``: as ``normswap.fold`` takes them, with convolutions that pad
    in their own way, and norms alone that are apart from theirs."""
    taken, in_a_row = set[int](), flow.forward is nn.Sequential.forward

    def stands(found: Growing) -> bool:
        """True where nobody can see that the operations are done together."""
        beside = beside_of(module, flow, found.ops, lambda op: child_of(module, op), norm_of, found.shared)
        found.beside = beside or {}
        return beside is not None

    def undisturbed(ops: Sequence[Op]) -> bool:
        return only_computes_between(flow, ops, lambda op: child_of(module, op))

    yield from _expressions(flow, stands, taken)
    for op in flow.ops:
        found = None if id(op) in taken else _core(module, op, norm_of, baked)
        if found is None:
            continue
        grow_behind(module, found, taken)
        if not in_a_row:
            found.feeds = fed_by(module, found, undisturbed)
        for one in (*_with_what_stands_before(module, found, taken, baked), found):
            # A child is a site itself, and PyTorch's op by running statistics as fast.
            left = one.type or (one.kind == "batch_norm" and not _may_train(module, one))
            alone = len(one.ops) == 1 and left and not one.feeds and not (baked and one.apart)
            if not alone and stands(one):
                taken.update(map(id, one.ops))
                yield _described(flow, one)
                break


def _expressions(flow: Flow, stands: _Stands, taken: set[int]) -> Iterator[Region]:
    """Norms that are written out, the longest first: what is ``taken`` grows by their operations."""
    regions = []
    for op in reversed(flow.ops):
        for name, formula in FORMULAS.items() if id(op) not in taken else ():
            whole = formula.find(op)
            if whole is None or isinstance(whole.values["x"], Constant):
                continue
            steps = [("norm", op, 0)]
            found = Growing(name, name, whole.values["x"], steps, (*whole.ops - {op},), expression=whole)
            if stands(found):
                taken.update(map(id, whole.ops))
                regions.append(_described(flow, found))
                break
    return reversed(regions)


def _core(module: nn.Module, op: Op, norm_of: Any, baked: bool) -> Growing | None:
    """The norm that ``op`` is, with what it calls itself behind that; None where it is none, or that is not known and
    is not to stay as it is."""
    steps = [("norm", op, 0)]
    if (kind := SPELLED.get(op.target, "")) in NORMS:
        whole = _CALLED[kind].find(op)
        return None if whole is None else Growing(kind, kind, whole.values["x"], steps, expression=whole)
    child = child_of(module, op)
    if child is None or len(op.args) + len(op.keywords) != 1 or not {*op.keywords} <= {"input", "x"}:
        return None
    if not calls_forward(type(child)):
        return None
    match = norm_of(child)
    if match is None or match.kind not in (*ROWS, *CHANNELS):
        return None
    name, (x,) = child_called(op), (*op.args, *op.keywords.values())
    expression = Found(frozenset([op]), {"x": x}) if op.keywords else Found()
    of = qualified(type(child))
    found = Growing(match.kind, name, x, steps, type=of, attributes=dict(match.attributes), expression=expression)
    inside = match.attributes.get("behind", "").split()
    found.passes = [f"{name}.{inner}" for inner in inside]
    kinds = [type(child._modules[inner]) for inner in inside]
    if kinds and kinds[-1] in CHILDREN:
        found.activation = found.passes.pop()
    return found if baked or all(kind in PASSING for kind in kinds[: len(found.passes)]) else None


def _with_what_stands_before(module: nn.Module, found: Growing, taken: set[int], baked: bool) -> Iterator[Growing]:
    """``found`` with each that its norm may be taken together with."""
    if found.kind != "batch_norm":
        return with_sum(found, taken)
    return chain(with_linear(module, found, taken), with_convolution(module, found, taken, baked))


def _may_train(module: nn.Module, found: Growing) -> bool:
    """Whether a batch_norm may be by the statistics of the batch, as the module is."""
    training = found.expression.values.get("training")
    return module.training and not (isinstance(training, Constant) and training.value is False)


def _described(flow: Flow, found: Growing) -> Region:
    """The region as data."""
    first = min(op.order for op in found.ops)  # of a branch not taken, a name may be read that holds no value here
    # What several operations are given is one value where the branches before them are taken so; one takes its own.
    inside = len(found.expression.ops) > 1 or any(op.conditional for op in found.ops)
    conditions = ((text, truth) for order, text, truth in flow.conditions if inside or order > first)
    nodes, constants = _nodes(flow, found.expression)
    return Region(
        found.kind,
        found.norm,
        tuple(Step(does, place_of(op.node, flow.tree), at, _is_method(op)) for does, op, at in found.steps),
        found.type,
        found.attributes,
        found.shared,
        found.seen,
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


def _nodes(flow: Flow, found: Found) -> tuple[tuple[Node, ...], dict[str, Any]]:
    """The operations of an expression as data, and what it takes that the source names."""
    ops = sorted(found.ops, key=lambda op: op.order)
    places = {id(op): index for index, op in enumerate(ops)}
    constants = {
        name: one_dim(value.value) if name == "dim" else value.value
        for name, value in found.values.items()
        if isinstance(value, Constant)
    }
    nodes, used = list[Node](), set[int | str]()
    for op in ops:
        operands: list[int | str] = []
        for value, written in zip((*op.args, *op.keywords.values()), slots(op.node, _is_method(op)), strict=True):
            names = {part.id for part in ast.walk(written) if isinstance(part, ast.Name)}
            if isinstance(value, Constant) and names.isdisjoint(flow.locals):
                operands.append("")
            elif id(value) in places:
                operands.append(places[id(value)])
            else:
                named = [name for name, known in found.values.items() if known is value or same(known, value)]
                named = named or [f"given_{len(nodes)}_{len(operands)}"]
                given = next((name for name in named if name not in (*used, *operands)), named[0])
                operands.append(given)
                if isinstance(value, Constant):
                    constants.setdefault(given, value.value)
        nodes.append(Node(place_of(op.node, flow.tree), tuple(operands), _is_method(op)))
        used.update(operands)
    return tuple(nodes), constants


def _is_method(op: Op) -> bool:
    return isinstance(op.target, str) and op.target.startswith(".")
