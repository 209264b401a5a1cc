"""Every way through a forward of (self, argument) that computes and branches, and does nothing else: what is computed
from what, from the argument to what is returned, methods of self and functions beside the class read along.

A branch on attributes of self that are None, flags or strings goes the way that the module goes now; one on the mode or
on a dtype may go both. Whatever else a forward does ends the reading.
"""

from __future__ import annotations

import ast
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from normswap.attributes import Rejection, own_tensors
from normswap.plans import Reason
from normswap.regions.flow import Attribute, Constant, Leaf, Op, Reader, Value, is_torchs
from normswap.source import definition, takes_another_argument

MOST_WAYS = 16
PLAIN = (type(None), bool, int, str, float)
UNKNOWN = object()

# For the sentence in a report; other constructs go by the name of their syntax node.
_WORDS = {
    "With": "a with block",
    "For": "a loop",
    "While": "a loop",
    "AugAssign": "an in-place assignment",
    "Expr": "a statement whose result is not used",
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


@dataclass
class Way:
    """One way through: its operations in order, what goes in and what comes out. ``choices``: how it branched where it
    might have gone either way. The rest is for its readers."""

    choices: list[bool] = field(default_factory=list)
    argument: Leaf = field(default_factory=Leaf)
    ops: list[Op] = field(default_factory=list)
    result: Value = field(default_factory=Leaf)
    order: int = 0
    chosen: int = 0
    training: bool | None = None

    def either(self) -> bool:
        """Where it goes at a branch that may go either way."""
        if self.chosen == len(self.choices):
            self.choices.append(True)
        self.chosen += 1
        return self.choices[self.chosen - 1]

    def mode(self) -> bool:
        """Whether the module is in training on it."""
        if self.training is None:
            self.training = self.either()
        return self.training


@dataclass
class Straight:
    """All ways through a forward; the attributes of self that are read on one of them, and those on which a branch
    depends; the methods of self and the functions of its module that are read along, by name."""

    forward: types.FunctionType
    ways: list[Way] = field(default_factory=list)
    reads: dict[str, None] = field(default_factory=dict)
    tested: set[str] = field(default_factory=set)
    methods: dict[str, types.FunctionType] = field(default_factory=dict)
    functions: dict[str, types.FunctionType] = field(default_factory=dict)

    @property
    def called(self) -> tuple[types.FunctionType, ...]:
        """All that forward calls."""
        return *self.methods.values(), *self.functions.values()


def straight(
    module: nn.Module, forward: types.FunctionType, reader: type[StraightReader] | None = None
) -> Straight | Rejection:
    """The ways through ``forward``, the one of the class of ``module``; or what it does beside computing. ``reader``:
    another class to read it."""
    tree = definition(forward)
    rejection = tree if isinstance(tree, Rejection) else takes_another_argument(forward)
    if rejection is not None:
        return rejection
    found = Straight(forward)
    choices: list[bool] = []
    while True:
        way = Way(choices)
        try:
            reading = (reader or StraightReader)(module, forward, found, way)
            way.result = reading.returned({forward.__code__.co_varnames[1]: way.argument})
        except NotUnderstood as error:
            return error.rejection
        found.ways.append(way)
        choices = _next(way.choices)
        if not choices:
            return found
        if len(found.ways) == MOST_WAYS:
            return Rejection(Reason.NOT_STRAIGHT_LINE, f"there are more than {MOST_WAYS} ways through forward")


def _next(choices: list[bool]) -> list[bool]:
    """The choices of the way to go next: True comes before False. None behind the last."""
    left = list(choices)
    while left and not left[-1]:
        left.pop()
    return [*left[:-1], False] if left else []


def method_of(cls: type[nn.Module], name: str) -> types.FunctionType | None:
    """The plain function behind the method ``name`` of ``cls``; None where that is something else."""
    found = inspect.getattr_static(cls, name, None)
    return found if isinstance(found, types.FunctionType) else None


def function_of(forward: types.FunctionType, name: str) -> types.FunctionType | None:
    """The plain function that the global ``name`` stands for in the module of ``forward``; None for anything else, and
    for torch's own."""
    found = forward.__globals__.get(name)
    return found if isinstance(found, types.FunctionType) and not is_torchs(found) else None


def plain_value(module: nn.Module, name: str) -> Any:
    """The value of a plain attribute, found without running code: the instance's, a parameter, buffer or None, or the
    class's. ``UNKNOWN`` where there is none."""
    on_class = inspect.getattr_static(type(module), name, UNKNOWN)
    if name in module.__dict__ and not hasattr(type(on_class), "__set__"):
        return module.__dict__[name]
    return own_tensors(module).get(name, UNKNOWN) if on_class is UNKNOWN else on_class


class NotUnderstood(Exception):
    """Where a forward does something else than compute."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.detail)
        self.rejection = rejection


class _Returned(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


class StraightReader(Reader):
    """Reads one function on one ``way``; ``above`` are those whose calls led here. Raises NotUnderstood."""

    def __init__(
        self,
        module: nn.Module,
        function: types.FunctionType,
        found: Straight,
        way: Way,
        above: tuple[Any, ...] = (),
        is_method: bool = True,
    ) -> None:
        tree = definition(function)
        if isinstance(tree, Rejection):
            raise NotUnderstood(tree)
        super().__init__(module, function, tree)
        self.found, self.way, self.above = found, way, (*above, function)
        self.ops = way.ops
        self.owner.name = self.owner.name if is_method else ""
        if function.__kwdefaults__ or any(type(v) not in PLAIN for v in function.__defaults__ or ()):
            self._refuse(f"{function.__name__} has defaults that are no plain constants")

    def returned(self, given: Mapping[str, Value]) -> Value:
        """What the function returns for these arguments."""
        self.env = dict(given)
        try:
            self.read_all(self.tree.body)
        except _Returned as end:
            return end.value
        self._refuse(f"{self.function.__name__} does not end in a return")

    def _refuse(self, detail: str, node: ast.AST | None = None) -> NoReturn:
        where = "" if node is None else f" at line {getattr(node, 'lineno', '?')}"
        raise NotUnderstood(Rejection(Reason.NOT_STRAIGHT_LINE, f"{detail}{where}"))

    def _next(self) -> int:
        self.way.order += 1
        return self.way.order

    # --- statements -----------------------------------------------------------------------------------------------

    def _read(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Return(value=ast.expr() as value):
                raise _Returned(self.value(value))
            case ast.If(test=test, body=body, orelse=orelse):
                self.read_all(body if self._truth(test) else orelse)
            case ast.Assign(targets=[*targets], value=value) if all(map(self._is_local, targets)):
                found = self.value(value)
                self.env |= {ast.unparse(target): found for target in targets}
            case ast.AnnAssign(target=target, value=ast.expr()) if self._is_local(target):
                super()._read(node)
            case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
                self._refuse(f"a store to {ast.unparse(target)}", node)
            case _:
                self._unknown(node)

    def _is_local(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id != self.owner.name

    def _truth(self, node: ast.expr) -> bool:
        """Where a branch goes on this way."""
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return all(map(self._truth, values))
            case ast.BoolOp(values=values):
                return any(map(self._truth, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._truth(operand)
            case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _COMPARED:
                one, other = self._tested(left), self._tested(right)
                if (_is_tensor(one) or _is_tensor(other)) and one is not None and other is not None:
                    self._undecidable(node)
                try:
                    return self.way.either() if UNKNOWN in (one, other) else bool(_COMPARED[type(how)](one, other))
                except TypeError:  # "a" in None, say
                    self._undecidable(node)
            case ast.Compare():
                self._undecidable(node)
        found = self._tested(node)
        return self._undecidable(node) if found is UNKNOWN or _is_tensor(found) else bool(found)

    def _undecidable(self, node: ast.expr) -> NoReturn:
        self._refuse(f"a branch on {ast.unparse(node)}", node)

    def _tested(self, node: ast.expr) -> Any:
        """What a branch depends on: the value of a constant or a plain attribute of self; ``UNKNOWN`` for a dtype."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            elements = tuple(self._tested(element) for element in node.elts)
            if any(map(_is_tensor, elements)):
                self._undecidable(node)
            return UNKNOWN if UNKNOWN in elements else elements
        match self.value(node):
            case Constant(value=value):
                return value
            case Op(target=".dtype"):
                return UNKNOWN
            case Attribute(path="training"):
                return self.way.mode()
            case Attribute(path=path) if path.endswith(".dtype"):
                return UNKNOWN
            case Attribute(path=path) if type(value := plain_value(self.module, path)) in PLAIN or _is_tensor(value):
                self.found.tested.add(path)
                return value
        self._undecidable(node)

    # --- expressions ----------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self._truth(test) else orelse)
            case ast.Subscript(slice=index) if any(_takes_a_part(n) for n in ast.walk(index)):
                self._refuse("a part of a tensor", node)
            case ast.Name(id=name) if name in self.locals and name != self.owner.name and name not in self.env:
                self._refuse(f"{name} is read before it is bound", node)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                found = super().value(node)
                if isinstance(found, Attribute) and found.path:
                    self.found.reads[found.path.partition(".")[0]] = None
                if isinstance(found, Leaf) and found is not self.way.argument and found.of is None:
                    self._refuse(f"the name {ast.unparse(node)}", node)
                return found
        return super().value(node)

    def _name(self, node: ast.Name) -> Value:
        known = super()._name(node)
        return Constant(value=known.value) if isinstance(known, Constant) else known  # on this way it holds that alone

    def _call(self, node: ast.Call, func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Value:
        name = func.attr if isinstance(func, ast.Attribute) and self.owner.is_it(func.value) else ""
        method = method_of(type(self.module), name)
        if method is not None:
            self.found.methods[name] = method
            return self._called(method, node, (Attribute(path=""),))
        if isinstance(func, ast.Name) and func.id not in self.locals and self.globals is self.found.forward.__globals__:
            function = function_of(self.found.forward, func.id)
            if function is not None:
                self.found.functions[func.id] = function
                return self._called(function, node, ())
        return super()._call(node, func, args, keywords)

    def _called(self, function: types.FunctionType, node: ast.Call, first: tuple[Value, ...]) -> Value:
        """What a call of ``function``, which is read along, gives."""
        name = ast.unparse(node.func)
        if function in self.above or not function.__code__.co_argcount:
            self._refuse(f"{name} calls itself, or takes no argument,", node)
        values = [*first, *(self.value(argument) for argument in node.args)]
        try:
            named = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
            bound = inspect.signature(function).bind(*values, **named)
        except TypeError as error:
            self._refuse(f"{name}: {error}", node)
        bound.apply_defaults()
        given = {k: v if isinstance(v, Value) else Constant(value=v) for k, v in bound.arguments.items()}
        return type(self)(self.module, function, self.found, self.way, self.above, bool(first)).returned(given)

    def _unknown(self, node: ast.AST) -> Value:
        self._refuse(_WORDS.get(type(node).__name__, type(node).__name__), node)

    def _opaque(self, *values: Value) -> Leaf:
        self._refuse("a call that is not understood")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _takes_a_part(node: ast.AST) -> bool:
    """Whether an index holds anything else than ``:``, ``...`` and None."""
    if isinstance(node, ast.Constant):
        return node.value not in (None, ...)
    return not isinstance(node, (ast.Slice, ast.Tuple, ast.Load))


def names_of(ops: list[Op]) -> Iterator[str]:
    """What a person calls the operations."""
    for op in ops:
        target = op.target
        if isinstance(target, str):
            yield target[1:-2] if target.endswith("()") else target
        else:
            yield target.__name__
