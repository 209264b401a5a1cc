"""What the source of a forward says when it may branch on flags and dtypes, call methods of self and functions beside
its class.

``source.scan`` understands straight-line code. Here an ``if`` is understood too, where its test depends on nothing but
attributes of self, None and dtypes: which branch runs, a trace with the same values then shows. What a rule pins at
run time beside that (``Reading.tested``) is what keeps a trace true.
"""

from __future__ import annotations

import ast
import inspect
import types
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normswap.plan import Reason
from normswap.source import NotUnderstood, Scanner, definition, is_torchs, takes_another_argument
from normswap.tracing import Rejection

_COMPARISONS = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)


@dataclass(frozen=True)
class Reading:
    """What a ``forward(self, argument)`` says, the methods of self and the functions of its module it calls read along.

    ``reads`` and ``operations`` are those of ``source.Scan``, what is called apart; ``tested`` holds the attributes of
    self on which a branch depends, ``methods`` and ``functions`` what is called as a method of self and by a global
    name of forward's module, by name.
    """

    argument: str
    reads: tuple[str, ...]
    operations: tuple[str, ...]
    tested: frozenset[str] = frozenset()
    methods: Mapping[str, types.FunctionType] = field(default_factory=dict)
    functions: Mapping[str, types.FunctionType] = field(default_factory=dict)

    @property
    def called(self) -> tuple[types.FunctionType, ...]:
        """All that forward calls."""
        return *self.methods.values(), *self.functions.values()


# By class; the forward is kept, and the codes, to notice others.
_readings: weakref.WeakKeyDictionary[
    type, tuple[Any, types.CodeType, Reading | Rejection, tuple[types.CodeType, ...]]
] = weakref.WeakKeyDictionary()


def read(cls: type[nn.Module], forward: types.FunctionType) -> Reading | Rejection:
    """Read the source of ``forward`` of ``cls`` and of the methods it calls, or the reason why it is not understood.
    The result is cached by class."""
    known = _readings.get(cls)
    if known is None or known[:2] != (forward, forward.__code__) or not _is_current(cls, forward, *known[2:]):
        result = _read(cls, forward)
        codes = () if isinstance(result, Rejection) else codes_of(result.called)
        known = _readings[cls] = (forward, forward.__code__, result, codes)
    return known[2]


def codes_of(functions: Iterable[types.FunctionType]) -> tuple[types.CodeType, ...]:
    """The code of each of ``functions`` now."""
    return tuple(function.__code__ for function in functions)


def _is_current(
    cls: type[nn.Module], forward: types.FunctionType, known: Reading | Rejection, codes: tuple[types.CodeType, ...]
) -> bool:
    """True while the same functions with the same code are behind the names."""
    if isinstance(known, Rejection):
        return True
    found = [method_of(cls, name) for name in known.methods] + [function_of(forward, name) for name in known.functions]
    return found == [*known.called] and codes_of(known.called) == codes


def _read(cls: type[nn.Module], forward: types.FunctionType) -> Reading | Rejection:
    if isinstance(tree := definition(forward), Rejection):
        return tree
    if (rejection := takes_another_argument(forward)) is not None:
        return rejection
    reader = _Reader(cls, forward, forward)
    try:
        reader.read_function()
    except NotUnderstood as error:
        return Rejection(Reason.NOT_STRAIGHT_LINE, str(error))
    except _Unreadable as error:
        return error.rejection
    argument = forward.__code__.co_varnames[1]
    return Reading(
        argument,
        tuple(dict.fromkeys(reader.reads)),
        tuple(reader.operations),
        frozenset(reader.tested),
        dict(reader.methods),
        dict(reader.functions),
    )


def method_of(cls: type[nn.Module], name: str) -> types.FunctionType | None:
    """The plain function behind the method ``name`` of ``cls``; None where that is something else."""
    found = inspect.getattr_static(cls, name, None)
    return found if isinstance(found, types.FunctionType) else None


def function_of(forward: types.FunctionType, name: str) -> types.FunctionType | None:
    """The plain function that the global ``name`` stands for in the module of ``forward``; None for anything else, and
    for torch's own."""
    found = forward.__globals__.get(name)
    return found if isinstance(found, types.FunctionType) and not is_torchs(found) else None


class _Unreadable(Exception):
    """A method or function whose source cannot be trusted."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.detail)
        self.rejection = rejection


class _Reader(Scanner):
    """A Scanner that follows branches, methods and functions from ``forward`` on; ``above`` are the functions whose
    calls led here. ``is_method`` says whether the first argument of ``function`` is self."""

    def __init__(
        self,
        cls: type[nn.Module],
        forward: types.FunctionType,
        function: types.FunctionType,
        above: tuple[Any, ...] = (),
        is_method: bool = True,
    ) -> None:
        super().__init__(function)
        if not is_method:
            self.owner = ""
        self.cls, self.forward, self.function, self.above = cls, forward, function, (*above, function)
        self.tested: set[str] = set()
        self.methods: dict[str, types.FunctionType] = {}
        self.functions: dict[str, types.FunctionType] = {}
        self.dtypes: frozenset[str] = frozenset()

    def read_function(self) -> None:
        tree = definition(self.function)
        if isinstance(tree, Rejection):
            raise _Unreadable(tree)
        if self.function.__kwdefaults__ or not all(_is_plain(v) for v in self.function.__defaults__ or ()):
            raise NotUnderstood(f"{self.function.__name__} has defaults that are no plain constants")
        self.dtypes = _names_of_dtypes(tree)
        first, *rest = tree.body
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        self._visit_all(rest if is_docstring else tree.body)

    def _visit_all(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        self._test(node.test)
        self._visit_all(node.body)
        self._visit_all(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._test(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_Slice(self, node: ast.Slice) -> None:
        if node.lower or node.upper or node.step:
            raise NotUnderstood(f"a part of a tensor at line {getattr(node, 'lineno', '?')}")

    def _test(self, node: ast.expr) -> None:
        """A condition that depends on attributes of self, None and dtypes alone."""
        if isinstance(node, ast.BoolOp):
            operands = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operands = [node.operand]
        elif isinstance(node, ast.Compare) and all(isinstance(op, _COMPARISONS) for op in node.ops):
            operands = [node.left, *node.comparators]
        else:
            self._tested_value(node)
            return
        for operand in operands:
            self._test(operand)

    def _tested_value(self, node: ast.expr) -> None:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            for element in node.elts:
                self._tested_value(element)
        elif isinstance(node, ast.Attribute) and self._is_self(node.value):
            self.reads.append(node.attr)
            self.tested.add(node.attr)
        elif isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in self.dtypes):
            pass
        elif self._is_dtype(node) or (isinstance(node, ast.Attribute) and self._torch_value(node) is not None):
            self.visit(node)
        else:
            raise NotUnderstood(f"a branch on {ast.unparse(node)} at line {node.lineno}")

    def _is_dtype(self, node: ast.expr) -> bool:
        """True for ``x.dtype`` and ``self.weight.dtype``."""
        return _reads_dtype(node) and isinstance(node.value, (ast.Name, ast.Attribute))  # type: ignore[attr-defined]

    def _callee(self, func: ast.expr) -> str:
        if isinstance(func, ast.Attribute) and self._is_self(func.value):
            method = method_of(self.cls, func.attr)
            if method is not None:
                self.methods[func.attr] = method
                return self._called(method, func, is_method=True)
        elif isinstance(func, ast.Name) and func.id not in self.locals and self.globals is self.forward.__globals__:
            function = function_of(self.forward, func.id)
            if function is not None:
                self.functions[func.id] = function
                return self._called(function, func, is_method=False)
        return super()._callee(func)

    def _called(self, function: types.FunctionType, func: ast.expr, is_method: bool) -> str:
        """Read ``function``, which ``func`` calls, along."""
        if function in self.above or not function.__code__.co_argcount:
            raise NotUnderstood(f"{ast.unparse(func)} calls itself, or takes no argument, at line {func.lineno}")
        below = _Reader(self.cls, self.forward, function, self.above, is_method)
        below.read_function()
        self.reads += below.reads
        self.operations += below.operations
        self.tested |= below.tested
        self.methods.update(below.methods)
        self.functions.update(below.functions)
        return f"{ast.unparse(func)}()"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _reads_dtype(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "dtype"


def _names_of_dtypes(tree: ast.FunctionDef) -> frozenset[str]:
    """The local names that are only ever given a dtype; a parameter is none of them."""
    names: dict[str, list[bool]] = {name.arg: [False] for name in ast.walk(tree.args) if isinstance(name, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).append(_reads_dtype(node.value))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, [])
    return frozenset(name for name, given in names.items() if given and all(given))
