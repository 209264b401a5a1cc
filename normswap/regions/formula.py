"""Patterns of expressions: a formula in a few lines of Python, and where it stands in a flow.

Every line but the last gives a part of the formula a name; ``|`` stands between spellings. Sums and products may be
written in either order. A name stands for one value throughout: "x" for the tensor that is normalised, others for what
the kind's op takes beside it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from normswap.kinds import KINDS
from normswap.regions.flow import OPERATORS, Attribute, Constant, Leaf, Op, Value
from normswap.regions.spelling import cast, constant, one_dim, parameters, spelled

_PARAMETERS = ("weight", "bias")
_TENSORS = ("x",)
_VIEWS = (".view()", ".reshape()", ".unsqueeze()")


@dataclass(frozen=True)
class Found:
    """The operations of an expression, and the values of the names in its formula."""

    ops: frozenset[Op] = frozenset()
    values: Mapping[str, Value] = field(default_factory=dict)


class Formula:
    """A pattern. With ``casts``, any value may be cast between dtypes on the way."""

    def __init__(self, text: str, casts: bool = False) -> None:
        *parts, last = ast.parse(text).body
        self.parts = {p.targets[0].id: p.value for p in parts}  # type: ignore[attr-defined]
        self.root: ast.expr = last.value  # type: ignore[attr-defined]
        self.casts = casts

    @functools.cached_property
    def operations(self) -> frozenset[str]:
        """What is done somewhere in it."""
        trees = [part for tree in (self.root, *self.parts.values()) for part in ast.walk(tree)]
        done = (n for n in trees if isinstance(n, ast.Call) or (isinstance(n, ast.BinOp) and type(n.op) in OPERATORS))
        return frozenset(_pattern_of(node)[0] for node in done)

    def find(self, op: Op, x: Value | None = None) -> Found | None:
        """The expression whose last operation is ``op``; with ``x``, the one that normalises that."""
        found = (found for found in self._match(self.root, op, Found()) if _is_whole(op, found))
        return min((one for one in found if x is None or one.values["x"] is x), key=_is_wider, default=None)

    def _spellings(self, node: ast.expr) -> Iterator[ast.expr]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self._spellings(node.left)
            yield from self._spellings(node.right)
        elif isinstance(node, ast.Name) and node.id in self.parts:
            yield from self._spellings(self.parts[node.id])
        elif isinstance(node, ast.UnaryOp):
            yield ast.Constant(ast.literal_eval(node))
        else:
            yield node

    def _match(self, node: ast.expr, value: Value, found: Found) -> Iterator[Found]:
        """All ways in which ``value`` is what ``node`` says, ``found`` being given."""
        if self.casts and isinstance(value, Op) and (inner := cast(value)) is not None:
            yield from self._match(node, inner, replace(found, ops=found.ops | {value}))
        for spelling in self._spellings(node):
            if isinstance(spelling, ast.Name):
                yield from self._name(spelling.id, value, found)
            elif isinstance(spelling, ast.Constant):
                if _is(spelling.value, value):
                    yield found
            elif isinstance(value, Op):
                yield from self._operation(spelling, value, found)

    def _name(self, name: str, value: Value, found: Found) -> Iterator[Found]:
        known = found.values.get(name)
        if isinstance(value, Constant) and (
            name in _TENSORS or (name == "dim" and type(one_dim(value.value)) is not int)
        ):
            return
        if self.casts and name in _PARAMETERS and not _is_own(value):
            return  # with something else than a weight it is no norm
        if known is None:
            yield replace(found, values={**found.values, name: value})
        elif known is value or same(known, value):
            yield found

    def _operation(self, node: ast.expr, op: Op, found: Found) -> Iterator[Found]:
        known, (name, wanted) = spelled(op), _pattern_of(node)
        if known is None or known[0] != name:
            return
        given, defaults = known[1], parameters(name)
        if any(not _is(defaults[key], value) for key, value in given.items() if key not in wanted):
            return
        found = replace(found, ops=found.ops | {op})
        yield from self._all([(part, given[key]) for key, part in wanted.items()], found)
        if name in ("+", "*"):
            yield from self._all([(wanted["input"], given["other"]), (wanted["other"], given["input"])], found)

    def _all(self, pairs: list[tuple[ast.expr, Value]], found: Found) -> Iterator[Found]:
        if not pairs:
            yield found
            return
        (node, value), *rest = pairs
        for one in self._match(node, value, found):
            yield from self._all(rest, one)


FORMULAS = {name: Formula(kind.formula, kind.casts) for name, kind in KINDS.items()}
"""The patterns of all kinds."""


@functools.cache
def _pattern_of(node: ast.expr) -> tuple[str, dict[str, ast.expr]]:
    """The operation that a part of a formula is, and its arguments by name."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)], {"input": node.left, "other": node.right}
    assert isinstance(node, ast.Call)
    name = ast.unparse(node.func)
    given = dict(zip(parameters(name), node.args, strict=False))
    return name, given | {str(keyword.arg): keyword.value for keyword in node.keywords}


def _is(wanted: Any, value: Value) -> bool:
    """Whether ``value`` is that constant."""
    found = constant(value)
    if type(wanted) in (int, float) and type(found) in (int, float):
        return bool(found == wanted)
    return type(found) is type(wanted) and found == wanted


def same(one: Value, other: Value) -> bool:
    """Whether two values are equal although they were read twice."""
    if isinstance(one, Constant) and isinstance(other, Constant):
        return type(one.value) is type(other.value) and bool(one.value == other.value)
    attributes = isinstance(one, Attribute) and isinstance(other, Attribute)
    return attributes and one.path == other.path and not one.computed  # type: ignore[attr-defined]


def _is_own(value: Value) -> bool:
    """Whether it is an attribute of self, perhaps with dims of one element more."""
    if isinstance(value, Op) and value.target in _VIEWS:
        return _is_own(value.args[0])
    return isinstance(value, Attribute) or (isinstance(value, Leaf) and value.of is not None and _is_own(value.of))


def _is_wider(found: Found) -> bool:
    """Whether "x" is cast within it and the result is not cast back: then what is cast had better be "x"."""
    x = found.values["x"]
    casts = [op for op in found.ops if cast(op) is not None]
    narrows = any(op.target != ".float()" and not _widens(op) for op in casts)
    return any(cast(op) is x for op in casts) and not narrows


def _widens(op: Op) -> bool:
    rest = [*op.args[1:], *op.keywords.values()]
    return any(isinstance(value, Constant) and value.value is torch.float32 for value in rest)


def _is_whole(last: Op, found: Found) -> bool:
    """Whether nobody else uses what lies between, and all of it runs at once."""
    return all(
        op.stretch == last.stretch and (op is last or all(user in found.ops for user in op.users)) for op in found.ops
    )
