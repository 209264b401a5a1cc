"""The regions of a forward: a norm, the sum before it, and the residual, scale and shift or activation behind it."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normswap.kinds import KINDS, NORMS
from normswap.plan import Match
from normswap.regions.activations import CHILDREN, called_activation, sigmoid_times
from normswap.regions.feeds import only_multiplies
from normswap.regions.flow import Constant, Flow, Op, Value, is_literal
from normswap.regions.foldings import is_convolution, is_foldable, why_apart
from normswap.regions.formula import FORMULAS, Formula, Found, same
from normswap.regions.linear import with_linear
from normswap.regions.moving import beside_of
from normswap.regions.spec import Node, Position, Region, Step, qualified, slots
from normswap.regions.spelling import one_dim
from normswap.regions.successors import with_successors
from normswap.regions.views import METHODS

FUNCTIONS = {norm.function: (norm.name, norm.parameters) for norm in NORMS.values()}
"""The norms that are called as functions: their kind, and what they take behind their input."""

_CALLED = {norm.name: Formula(norm.formula) for norm in NORMS.values()}

ROWS = tuple(norm.name for norm in NORMS.values() if norm.rows)
CHANNELS = tuple(norm.name for norm in NORMS.values() if not norm.rows)
FEEDING = tuple(norm.name for norm in NORMS.values() if norm.widens)
"""Kinds that autocast runs in float32."""
ADDS: tuple[Any, ...] = ("+", torch.add, ".add()")
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
NAMES = frozenset({"mean", "norm", "vector_norm", "normalize", "var", *_CALLED})
"""A forward that names none of these computes no norm itself."""


@dataclass
class _Found:
    """A region while it grows: its operations, from the first to the last, and what ``Region`` wants of them."""

    kind: str
    norm: str
    x: Value
    ops: list[Op]
    steps: list[tuple[str, Op, int]]
    match: Match | None = None
    type: str = ""
    shared: bool = False
    passes: list[str] = field(default_factory=list)
    activation: str | tuple[str, float, float] | None = None
    convolution: str = ""
    linear: str = ""
    factor: tuple[str, ...] = ()
    apart: str = ""
    feeds: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    expression: Found = field(default_factory=Found)

    @property
    def last(self) -> Op:
        return self.ops[-1]


def regions_of(module: nn.Module, flow: Flow, norm_of: Any, baked: bool = False) -> Iterator[Region]:
    """Every region of ``flow``, a reading of the forward of ``module``, none within another. ``norm_of(child)`` is the
    Match of a child that is a norm, else None. ``baked``: as ``normswap.fold`` takes them, with convolutions that pad
    in their own way, and norms alone that are apart from theirs."""
    taken, made = set[int](), list[_Found]()
    yield from _expressions(module, flow, norm_of, taken)
    for op in flow.ops:
        found = None if id(op) in taken else _core(module, op, norm_of)
        if found is None:
            continue
        _grow_behind(module, found, taken)
        while found.steps[-1][0] == "pass":  # nothing behind it: a dropout that is on need not stop the rest
            found.ops.pop(), found.steps.pop(), found.passes.pop()
        found.feeds = _fed(module, found)
        by_batch = found.kind == "batch_norm"
        for one in (*_with_what_stands_before(module, found, taken, baked), found):
            left = one.type or (by_batch and not _may_train(module, one))  # is a site, or PyTorch's op is as fast
            alone = len(one.ops) == 1 and left and not one.feeds and not (baked and one.apart)
            if not alone and _stands(module, flow, one, norm_of):
                taken.update(map(id, one.ops))
                made.append(one)
                break
    yield from with_successors(
        made, [_region(flow, one) for one in made], lambda one: _stands(module, flow, one, norm_of)
    )


def _expressions(module: nn.Module, flow: Flow, norm_of: Any, taken: set[int]) -> Iterator[Region]:
    """Norms that are written out, the longest first: what is ``taken`` grows by their operations."""
    regions = []
    for op in reversed(flow.ops):
        for name, formula in FORMULAS.items() if id(op) not in taken else ():
            whole = formula.find(op)
            if whole is None or isinstance(whole.values["x"], Constant):
                continue
            ops = [*whole.ops - {op}, op]
            found = _Found(name, name, whole.values["x"], ops, [("norm", op, 0)], expression=whole)
            if _stands(module, flow, found, norm_of):
                taken.update(map(id, whole.ops))
                regions.append(_region(flow, found))
                break
    return reversed(regions)


def _core(module: nn.Module, op: Op, norm_of: Any) -> _Found | None:
    if op.target in FUNCTIONS:
        kind, _ = FUNCTIONS[op.target]
        whole = _CALLED[kind].find(op)
        if whole is None:
            return None
        return _Found(kind, kind, whole.values["x"], [op], [("norm", op, 0)], expression=whole)
    child = _child(module, op)
    if child is None or len(op.args) + len(op.keywords) != 1 or not {*op.keywords} <= {"input", "x"}:
        return None
    match = norm_of(child)
    if match is None or match.kind not in (*ROWS, *CHANNELS):
        return None
    cls = type(child)
    x, name = (*op.args, *op.keywords.values())[0], op.target[len("self.") :]
    expression = Found(frozenset([op]), {"x": x}) if op.keywords else Found()
    found = _Found(match.kind, name, x, [op], [("norm", op, 0)], match, expression=expression)
    found.type = qualified(cls)
    return _with_ending(child, found)


def _with_ending(norm: nn.Module, found: _Found) -> _Found | None:
    """``found`` with what ``norm`` itself calls behind the norm; None where that is more than is known."""
    assert found.match is not None
    ending = ending_of(found.norm, norm, found.match)
    if ending is None:
        return None
    found.passes, found.activation = ending
    return found


def ending_of(name: str, norm: nn.Module, match: Match) -> tuple[list[str], str | None] | None:
    """The children of the norm called ``name`` that it calls behind the norm, by their paths: those that hand on what
    they get, and the activation at the end; None where there are others."""
    inside = match.attributes.get("behind", "").split()
    kinds = [type(norm._modules[child]) for child in inside]
    paths = [f"{name}.{child}" for child in inside]
    activation = paths.pop() if kinds and kinds[-1] in CHILDREN else None
    return (paths, activation) if all(kind in PASSING for kind in kinds[: len(paths)]) else None


def _child(module: nn.Module, op: Op) -> nn.Module | None:
    """The child of ``module`` that ``op`` calls."""
    name = op.target[len("self.") :] if isinstance(op.target, str) and op.target.startswith("self.") else ""
    hidden = name in module.__dict__ or inspect.getattr_static(type(module), name, None) is not None
    return None if hidden else module._modules.get(name)


def _may_train(module: nn.Module, found: _Found) -> bool:
    """Whether a batch_norm may be by the statistics of the batch, as the module is."""
    training = found.expression.values.get("training")
    return module.training and not (isinstance(training, Constant) and training.value is False)


def _only_user(value: Op) -> Op | None:
    (user,) = value.users if len(value.users) == 1 else (None,)
    return user if user is not None and user.stretch == value.stretch else None


def _grow_behind(module: nn.Module, found: _Found, taken: set[int]) -> None:
    """Take in what is done with the norm's result, up to an activation and nothing of another region (``taken``)."""
    if found.activation is not None:
        return
    if (gated := sigmoid_times(found.last)) is not None:
        found.ops += gated
        found.steps += [("activation", gated[-1], gated[-1].args.index(gated[0].args[0]))]
        found.activation = ("silu", 0.0, 0.0)
        return
    permuted = _permuted(found)
    while (user := _only_user(found.last)) is not None and id(user) not in taken:
        operand = user.args.index(found.last) if found.last in user.args else -1
        child = _child(module, user)
        if operand < 0:
            return
        if permuted and user.target == ".permute()" and _dims(user) == (0, 3, 1, 2):
            _take(found, "permute back", user, 0)
            return
        if type(child) in PASSING and len(user.args) == 1:
            found.passes.append(user.target[len("self.") :])
            _take(found, "pass", user, 0)
        elif not permuted and _behind(found, user, operand):
            continue
        elif (activation := called_activation(child, user)) is not None and not permuted:
            found.activation = activation
            _take(found, "activation", user, 0)
            return
        else:
            return


def _fed(module: nn.Module, found: _Found) -> tuple[str, ...]:
    """The children that the result goes through to one that autocast makes read it in 16 bits; none outside autocast,
    and where anything else may read it."""
    names: list[str] = []
    value = found.last
    if found.kind not in FEEDING or not any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        return ()
    while (user := _only_user(value)) is not None and user.args[:1] == (value,):
        child = _child(module, user)
        names.append(str(user.target)[len("self.") :])
        if type(child) not in PASSING:
            return tuple(names) if child is not None and only_multiplies(child, type) else ()
        value = user
    return ()


def _behind(found: _Found, user: Op, operand: int) -> bool:
    """Take in a residual, or the gain and shift of an adaptive norm."""
    done = {does for does, _, _ in found.steps}
    other = user.args[1 - operand] if len(user.args) == 2 and not user.keywords else None
    if other is None or isinstance(other, Constant):
        return False
    if found.kind in CHANNELS and user.target in (*ADDS, "+=") and "residual" not in done:
        return _take(found, "residual", user, operand) if user.target != "+=" or operand == 0 else False
    if found.kind not in ROWS or "shift" in done:
        return False
    if user.target == "*" and "gain" not in done and isinstance(other, Op) and _is_one_plus(other, user):
        return _take(found, "gain", user, operand)
    return user.target == "+" and "gain" in done and _take(found, "shift", user, operand)


def _is_one_plus(value: Op, product: Op) -> bool:
    """``1 + s``, written in the product itself."""
    ones = [arg for arg in value.args if is_literal(arg) and arg.value == 1]
    written = value.node in (getattr(product.node, "left", None), getattr(product.node, "right", None))
    return value.target == "+" and len(ones) == 1 and len(value.users) == 1 and written


def _take(found: _Found, does: str, op: Op, operand: int) -> bool:
    found.ops.append(op)
    found.steps.append((does, op, operand))
    return True


def _with_what_stands_before(module: nn.Module, found: _Found, taken: set[int], padded: bool) -> Iterator[_Found]:
    if found.kind != "batch_norm":
        before = [_with_sum(found, taken)]
    else:
        norm = module._modules.get(found.norm) if found.type else None
        child_of = functools.partial(_child, module)
        before = [with_linear(found, norm, taken, child_of), _with_convolution(module, found, taken, padded)]
    yield from filter(None, before)


def _with_convolution(module: nn.Module, found: _Found, taken: set[int], padded: bool) -> _Found | None:
    """``found`` and the convolution whose output is normalised; None where none can be taken in."""
    norm, before = found.ops[0], found.x
    child = _child(module, before) if isinstance(before, Op) and id(before) not in taken else None
    if not isinstance(before, Op) or not is_convolution(child) or len(before.args) != 1 or before.keywords:
        return None
    if not found.type or not is_foldable(module._modules[found.norm]):
        return None
    name = before.target[len("self.") :]
    reason = why_apart(child, before.users == [norm] and before.stretch == norm.stretch, padded)
    if reason:
        found.apart = f"{name} {reason}"
        return None
    return replace(found, convolution=name, ops=[before, *found.ops], steps=[("convolution", before, 0), *found.steps])


def _with_sum(found: _Found, taken: set[int]) -> _Found | None:
    """``found`` and the sum that a LayerNorm or RMSNorm is of, or the permutation before it; None where none is."""
    norm, before = found.ops[0], found.x
    if not isinstance(before, Op) or before.stretch != norm.stretch or id(before) in taken:
        return None
    if any(does == "permute back" for does, _, _ in found.steps):
        return replace(found, ops=[before, *found.ops], steps=[("permute", before, 0), *found.steps])
    met, inner, view = before, _viewed(before), list[Op]()
    if inner is not None and id(inner) not in taken:
        before, view = inner, [met]
    operands = [arg for arg in before.args if not isinstance(arg, Constant)]
    if found.kind not in ROWS or before.target not in ADDS or len(before.args) != 2 or before.keywords:
        return None
    if len(operands) != 2:
        return None
    others = [user for user in met.users if user is not norm]
    # Where others use the sum too, all is computed where that is: nothing that comes later may be needed.
    if (others or view) and not (_is_simple(found) and found.type and (_is_assigned(met) or not others)):
        return None
    steps = [("sum", before, 0), *(("view", op, 0) for op in view), *found.steps]
    return replace(found, shared=bool(others), ops=[before, *view, *found.ops], steps=steps)


def _viewed(op: Op) -> Op | None:
    """What ``op`` is a view of, where nobody else uses that."""
    inner = op.args[0] if op.target in METHODS and op.args and not op.keywords else None
    fits = isinstance(inner, Op) and inner.users == [op] and inner.stretch == op.stretch
    return inner if fits else None  # type: ignore[return-value]


def _is_simple(found: _Found) -> bool:
    return all(does in ("norm", "pass", "activation") for does, _, _ in found.steps)


def _is_assigned(op: Op) -> bool:
    """``name = <op>`` and nothing else."""
    statement = op.statement
    return isinstance(statement, ast.Assign) and statement.value is op.node


def _permuted(found: _Found) -> bool:
    """Whether the norm is of ``x.permute(0, 2, 3, 1)``, which nobody else uses."""
    before = found.x
    return (
        found.kind == "layer_norm"
        and isinstance(before, Op)
        and before.target == ".permute()"
        and before.users == [found.ops[0]]
        and before.stretch == found.ops[0].stretch
        and _dims(before) == (0, 2, 3, 1)
    )


def _dims(op: Op) -> tuple[Any, ...]:
    values = tuple(arg.value for arg in op.args[1:] if is_literal(arg))
    return values[0] if len(values) == 1 and isinstance(values[0], tuple) else values


def _stands(module: nn.Module, flow: Flow, found: _Found, norm_of: Any) -> bool:
    """True where nobody can see that the operations are done together."""
    beside = beside_of(flow, found.ops, lambda op: _child(module, op), norm_of, found.shared)
    found.beside = beside or {}
    return beside is not None


def _region(flow: Flow, found: _Found) -> Region:
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
