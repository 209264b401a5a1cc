"""A module whose whole forward is a norm written out, whichever way it branches."""

from __future__ import annotations

import ast
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from normswap.attributes import Rejection, is_hidden, own_getattr, own_tensors
from normswap.plans import Match, Reason, Refusal
from normswap.regions.flow import Attribute, Constant, Leaf, Op, Value
from normswap.regions.formula import FORMULAS, Formula, Found
from normswap.regions.spelling import cast, constant, spelled
from normswap.regions.straight import PLAIN, Straight, Way, names_of, plain_value, straight

_CASTS = frozenset({"to", "float", "type", "type_as"})
_VIEWS = frozenset({"view", "reshape", "unsqueeze"})
_HARMLESS = frozenset({".dtype", ".device"})


@dataclass(frozen=True)
class Whole:
    """What was read of a forward: for each way through it the values that the names of the formula stand for, and what
    else it reads: ``tensors``, and plain attributes by name (``plain``)."""

    read: Straight
    found: tuple[Mapping[str, Value], ...]
    tensors: tuple[str, ...]
    plain: Mapping[str, Any]

    def number(self, name: str, live: Iterable[str]) -> str | float | None:
        """What a name of the formula stands for on every way: an attribute that is one of ``live``, a number, or None
        where the formula has another spelling. Raises NotTheNorm for anything else."""
        values = {self._number(found.get(name), live) for found in self.found}
        if len(values) > 1:
            raise NotTheNorm("forward depends on its mode, or on an attribute's value")
        return values.pop()

    def _number(self, value: Value | None, live: Iterable[str]) -> str | float | None:
        if value is None:
            return None
        if isinstance(value, Attribute) and value.path in live:
            return value.path
        known = self.plain.get(value.path) if isinstance(value, Attribute) else constant(value)
        if type(known) not in (int, float):
            raise NotTheNorm(f"forward takes {_shown(value)} where a number is needed")
        return known  # type: ignore[return-value]


class NotTheNorm(Exception):
    """Where a forward departs from the norm."""

    def __init__(self, detail: str, reason: Reason = Reason.UNSUPPORTED) -> None:
        super().__init__(detail)
        self.reason = reason


# By class, all of a module that the answer depends on.
_judged: weakref.WeakKeyDictionary[type, dict[Hashable, Match | Refusal]] = weakref.WeakKeyDictionary()


def judged(
    module: nn.Module,
    functions: Sequence[types.FunctionType],
    formula: str,
    kind: str,
    form: Callable[[nn.Module, Whole], Match],
) -> Match | Refusal:
    """What ``module`` is a site of, whose forward is the first of ``functions``, which calls the others: the Match that
    ``form(module, whole)`` makes of it where it is ``formula`` and nothing else; or why it is no site of ``kind``."""
    plain = ((name, type(value), value) for name, value in module.__dict__.items() if type(value) in PLAIN)
    shapes = ((name, None if t is None else small(t)) for name, t in own_tensors(module).items())  # no size is read
    codes = ((weakref.ref(function), function.__code__) for function in functions)
    known, key = _judged.setdefault(type(module), {}), (kind, *codes, *plain, *shapes)
    if key not in known:
        try:
            known[key] = form(module, read_whole(module, functions[0], FORMULAS[formula]))
        except NotTheNorm as difference:
            known[key] = Refusal(kind, difference.reason, str(difference))
    return known[key]


def small(tensor: Tensor) -> tuple[int, ...]:
    """Its shape, all sizes but one as one other."""
    return tuple(3 if size > 1 else 1 for size in tensor.shape)


def read_whole(module: nn.Module, forward: types.FunctionType, formula: Formula) -> Whole:
    """What ``forward``, the one of the class of ``module``, takes where it is the norm ``formula`` and nothing else.
    Raises NotTheNorm."""
    read = _understood(straight(module, forward))
    if any(name in module.__dict__ for name in read.methods):
        raise NotTheNorm("a method was replaced on the instance")
    found = list[Mapping[str, Value]]()
    for way in read.ways:
        whole = formula.find(way.result, way.argument) if isinstance(way.result, Op) else None
        if whole is None or not _is_all(way, whole):
            raise _difference(formula, way)
        found.append(whole.values)
    return Whole(read, tuple(found), *_attributes(module, read))


_Read = TypeVar("_Read")


def _understood(read: _Read | Rejection) -> _Read:
    if isinstance(read, Rejection):
        raise NotTheNorm(read.detail, read.reason)
    return read


def _is_all(way: Way, whole: Found) -> bool:
    """Whether nothing else is computed: what a cast or a branch asks for aside, and views of the weight."""
    rest = [op for op in way.ops if op not in whole.ops]
    weight = whole.values.get("weight")
    return all(op.target in _HARMLESS or (weight is not None and op in within(weight)) for op in rest)


def within(value: Value) -> list[Value]:
    """A view and what it is of."""
    inner = value.args[0] if isinstance(value, Op) else value.of if isinstance(value, Leaf) else None
    return [value, *(within(inner) if inner is not None else [])]


def _difference(formula: Formula, way: Way) -> NotTheNorm:
    """Why what one way computes is another function."""
    beside = _HARMLESS | (_CASTS | _VIEWS if formula.casts else set())
    done = zip(names_of(way.ops), map(spelled, way.ops), strict=True)
    if extra := [name for name, op in done if (name not in beside if op is None else op[0] not in formula.operations)]:
        detail = f"besides the norm, forward does {', '.join(dict.fromkeys(extra))}"
        return NotTheNorm(detail, Reason.PART_OF_FORWARD)
    for name, given in filter(None, map(spelled, way.ops)):
        if name == "mean":
            dim, keepdim = constant(given["dim"]), constant(given["keepdim"])
            if isinstance(dim, (tuple, type(None))) or not keepdim:
                return NotTheNorm(f"mean over dim={dim}, keepdim={keepdim}; only one dim with keepdim=True is swapped")
    computed = ", ".join(names_of(way.ops)) or "nothing"
    how = " in another mode, or with another dtype" if way.choices and not all(way.choices) else ""
    return NotTheNorm(f"forward computes another function{how}: {computed}")


def _attributes(module: nn.Module, read: Straight) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The tensors and the plain attributes that are read from self."""
    _understood(own_getattr(module))
    tensors, plain = [], {}
    for name in read.reads:
        value = plain_value(module, name)
        if isinstance(value, Tensor) and name in own_tensors(module):
            if is_hidden(module, name):
                raise NotTheNorm(f"self.{name} is not a Parameter, a buffer or a child")
            tensors.append(name)
        elif type(value) in PLAIN:
            plain[name] = value
        else:
            raise NotTheNorm(f"forward reads self.{name}, which is no tensor, number or flag")
    plain.pop("training", None)
    return tuple(tensors), plain


def _shown(value: Value) -> str:
    if isinstance(value, Attribute):
        return f"self.{value.path}"
    return ast.unparse(value.node) if isinstance(value, Op) else "something else"


def as_it_is_met(value: Value, stored: Tensor) -> Tensor | None:
    """The weight ``stored`` as a view of it that is ``value``; None where that depends on more than constants."""
    if isinstance(value, Attribute):
        return stored
    if isinstance(value, Op):
        inner = as_it_is_met(value.args[0], stored)
        if inner is None or cast(value) is not None:
            return inner
        constants = [argument.value for argument in value.args[1:] if isinstance(argument, Constant)]
        if len(constants) < len(value.args) - 1 or value.keywords:
            return None
        return getattr(inner, value.target[1:-2])(*constants)  # type: ignore[no-any-return]
    inner = as_it_is_met(value.of, stored) if isinstance(value, Leaf) and value.of is not None else None
    return None if inner is None else inner[_index(value.index)]  # type: ignore[attr-defined]


def _index(node: ast.expr) -> Any:
    """An index of ``:``, ``...`` and None alone."""
    if isinstance(node, ast.Tuple):
        return tuple(_index(element) for element in node.elts)
    return slice(None) if isinstance(node, ast.Slice) else ast.literal_eval(node)


def without_values(
    module: nn.Module, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], training: bool
) -> nn.Module:
    """A module of the same class that holds ``tensors`` and the attributes ``plain``, and nothing else."""
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin._buffers.update(tensors)
    twin.__dict__.update(plain, training=training)
    return twin
