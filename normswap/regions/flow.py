"""What is computed from what in ONE forward: its straight-line stretches as operations in order of evaluation.

An ``if`` on attributes of self that hold None or a flag is followed into the branch that is taken, and the condition
kept; every other body of a compound statement is a stretch of its own. What is not understood is opaque: its result is
a leaf, and it may have any effect.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from normswap.attributes import Rejection, own_getattr
from normswap.plans import Reason
from normswap.regions.inline import inlined
from normswap.regions.owner import Owner
from normswap.source import definition, global_named, is_global, undecorated

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
SEES_LOCALS = frozenset({"locals", "vars", "eval", "exec", "dir", "super", "__class__"})
"""Names by which a function reaches what it does not name."""
_NESTED = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp)


@dataclass(eq=False)
class Value:
    """A value and who uses it: operations of its stretch, or None for others and for what is opaque."""

    users: list[Op | None] = field(default_factory=list)


@dataclass(eq=False)
class Leaf(Value):
    """A parameter, or the result of something that is not understood; ``of``: what it is a part or view of, by
    ``index``."""

    of: Value | None = None
    index: ast.expr | None = None


@dataclass(eq=False)
class Constant(Value):
    """A literal, or a tuple of literals. ``named``: by a local name, which may hold another on another call."""

    value: Any = None
    named: bool = False


@dataclass(eq=False)
class Attribute(Value):
    """``self.path``. ``computed``: reading it may run somebody's code."""

    path: str = ""
    computed: bool = False


@dataclass(eq=False)
class Op(Value):
    """One operation. ``target``: an operator's symbol ("+", "+=" in place), a function, ".name" of a method or an
    attribute of a value, "self.path" for a call of a child."""

    target: Any = None
    args: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    node: ast.expr | ast.AugAssign = field(default_factory=ast.expr)
    order: int = 0
    stretch: int = 0
    statement: ast.stmt | None = None
    conditional: bool = False
    """Whether some ``if`` that was followed stands around it."""


def is_literal(value: Value) -> TypeGuard[Constant]:
    """Whether it is written in the source at the very place."""
    return isinstance(value, Constant) and not value.named


@dataclass
class Flow:
    """The operations of one forward, the moments at which something opaque happens, and the names that code inside it
    captures. ``conditions``: (order, expression, truth) of each ``if`` that was followed; ``functions``: those that
    were read as the line they return."""

    tree: ast.FunctionDef
    forward: types.FunctionType
    ops: list[Op]
    effects: list[int]
    conditions: list[tuple[int, str, bool]]
    captured: frozenset[str]
    functions: dict[str, types.FunctionType]
    locals: frozenset[str]

    def opaque_between(self, first: int, last: int) -> bool:
        """Whether something that is not understood happens between two moments; operations are not looked at."""
        return any(first < order < last for order in self.effects)


def read(module: nn.Module, forward: types.FunctionType) -> Flow | Rejection:
    """The flow of ``forward``, the one of the class of ``module``; or why it cannot be rewritten."""
    whole, forward = forward, undecorated(forward)
    tree = definition(forward, decorated=forward is not whole)
    if isinstance(tree, Rejection):
        return tree
    if (rejection := own_getattr(module)) is not None:
        return rejection
    flags = forward.__code__.co_flags
    if flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return Rejection(Reason.NOT_STRAIGHT_LINE, "forward is a generator or a coroutine")
    if not forward.__code__.co_argcount:
        return Rejection(Reason.UNSUPPORTED, "forward has no parameter self")
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    owner = forward.__code__.co_varnames[0]
    if any(node.id == owner and not isinstance(node.ctx, ast.Load) for node in names):
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"forward binds {owner}")
    if seen := {node.id for node in names} & SEES_LOCALS:
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"forward names {', '.join(sorted(seen))}")
    tree, functions = inlined(tree, forward.__globals__)
    reader = Reader(module, forward, tree)
    reader.read_all(tree.body)
    found = reader.ops, reader.effects, reader.conditions, reader.captured
    return Flow(tree, forward, *found, functions, reader.locals)


def _captured(tree: ast.FunctionDef) -> frozenset[str]:
    """The names that code inside the function mentions: it may read them at any time."""
    inner = (node for node in ast.walk(tree) if isinstance(node, (*_NESTED, ast.GeneratorExp)) and node is not tree)
    named = frozenset(n.id for node in inner for n in ast.walk(node) if isinstance(n, ast.Name))
    declared = (n for n in ast.walk(tree) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return named | frozenset(name for node in declared for name in node.names)


def _bound_elsewhere(tree: ast.FunctionDef) -> frozenset[str]:
    """The names that other code may give another value at any time, and private ones, which Python calls otherwise."""
    nodes = [*ast.walk(tree)]
    declared = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    later = [part for node in nodes if isinstance(node, ast.GeneratorExp) for part in ast.walk(node)]
    declared |= {part.target.id for part in later if isinstance(part, ast.NamedExpr)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(declared | {name for name in named if name.startswith("__") and not name.endswith("__")})


class Reader:
    """Reads the function ``tree`` of ``module``."""

    def __init__(self, module: nn.Module, forward: types.FunctionType, tree: ast.FunctionDef) -> None:
        self.module, self.globals = module, forward.__globals__
        self.tree, self.owner = tree, Owner(module, tree, forward.__code__.co_varnames[0])
        self.locals = frozenset((*forward.__code__.co_varnames, *forward.__code__.co_cellvars))
        self.captured, self.bound_elsewhere = _captured(tree), _bound_elsewhere(tree)
        self.env: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.effects: list[int] = []
        self.conditions: list[tuple[int, str, bool]] = []
        self.order = self.stretch = self.depth = 0
        self.function, self.may_stop = forward, False
        self.statement: ast.stmt | None = None

    # --- statements -----------------------------------------------------------------------------------------------

    def stretch_of(self, body: Sequence[ast.stmt]) -> None:
        """Read ``body`` as a stretch of its own: whatever was bound before is a leaf."""
        self._forget()
        self.read_all(body)
        self._forget()  # what is bound at its end may be read outside

    def _forget(self) -> None:
        """Begin a stretch: anybody may have used what is bound, and anything may happen in between."""
        self._escape(*self.env.values())
        self.env = {}
        self.stretch += 1
        self._effect()

    def read_all(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if self.may_stop:
                self._forget()  # what comes before it may be read although it is never reached
            self.statement = statement
            self._read(statement)

    def _read(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._bind(name, self.value(value))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._bind(name, self.value(value))
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=value) if _are_names(elements):
                found = self.value(value)
                self._pure(found) if isinstance(found, Op) else self._opaque(found)  # may be an iterator with effects
                self.env |= {ast.unparse(element): Leaf() for element in elements}
            case ast.AugAssign(target=ast.Name(id=name), op=operator, value=value):
                old = self._name(ast.Name(name, ast.Load()))
                new = self.value(value)
                symbol = OPERATORS.get(type(operator), "")
                self._bind(name, self._op(f"{symbol}=", (old, new), {}, node) if symbol else self._opaque(old, new))
            case ast.Return(value=value):
                if value is not None:
                    self._escape(self.value(value))
                if self.depth:
                    self._forget()  # what follows runs only where the condition does not hold
            case ast.Expr(value=value):
                self.value(value)
            case ast.If(test=test, body=body, orelse=orelse) if (taken := self.owner.decided(test)) is not None:
                self.conditions.append((self._next(), self.owner.as_condition(test), taken))
                self.depth += 1
                self.read_all(body if taken else orelse)
                self.depth -= 1
            case ast.Pass():
                pass
            case _:
                self._compound(node)

    def _bind(self, name: str, value: Value) -> None:
        """``value`` has that name from now on, by which others may read it."""
        if name in self.captured or name in self.bound_elsewhere:
            self._escape(value)
        self.env[name] = value

    def _compound(self, node: ast.stmt) -> None:
        """A statement that is not followed: its bodies are stretches of their own, the rest of it is opaque."""
        # A def is another function; a handler may ask how far the body of a try came.
        names = () if isinstance(node, _DEFINITIONS) else ("body", "orelse", "finalbody")[isinstance(node, _TRIES) :]
        before, self.may_stop = self.may_stop, self.may_stop or self._catches(node)
        self._forget()
        for name in names:
            self.stretch_of(getattr(node, name, ()))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            self.stretch_of(part.body)
        self._forget()
        self.may_stop = before

    def _catches(self, node: ast.stmt) -> bool:
        """Whether the code around ``node`` may go on where something in its bodies raises: behind a try, or behind a
        with block of what is not torch's."""
        if not isinstance(node, ast.With):
            return isinstance(node, _TRIES)
        entered = [item.context_expr for item in node.items]
        made = [global_named(one.func, self.function) if isinstance(one, ast.Call) else None for one in entered]
        return not all(str(getattr(one, "__module__", "")).partition(".")[0] == "torch" for one in made)

    # --- expressions ----------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Name():
                return self._name(node)
            case ast.Constant(value=value):
                return Constant(value=value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return Constant(value=-number)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                operands = self.value(left), self.value(right)
                return self._op(OPERATORS[type(operator)], operands, {}, node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._call(node, func, args, keywords)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                values = [self.value(element) for element in elements]
                constants = [v for v in values if isinstance(v, Constant)]
                if len(constants) == len(values):
                    return Constant(value=tuple(v.value for v in constants), named=any(v.named for v in constants))
                return self._pure(*values)
            case ast.Subscript(value=base, slice=index):
                whole = self.value(base)
                self._pure(whole, self._index(index))
                return Leaf(of=whole, index=index)
        return self._unknown(node)

    def _index(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Slice):
            return self._pure(*(self.value(part) for part in (node.lower, node.upper, node.step) if part is not None))
        if isinstance(node, ast.Tuple):
            return self._pure(*(self._index(element) for element in node.elts))
        return self.value(node)

    def _name(self, node: ast.Name) -> Value:
        if node.id == self.owner.name:
            return Attribute(path="")
        if node.id in self.bound_elsewhere:
            return Leaf()
        if node.id in self.locals:
            known = self.env.setdefault(node.id, Leaf())
            return Constant(value=known.value, named=True) if isinstance(known, Constant) else known
        found = self.globals.get(node.id, abs if node.id == "abs" else _UNKNOWN)
        return Constant(value=found) if is_torchs(found) or isinstance(found, types.FunctionType) else Leaf()

    def _attribute(self, node: ast.Attribute) -> Value:
        base = self.value(node.value)
        if isinstance(base, Attribute):
            path = f"{base.path}.{node.attr}".removeprefix(".")
            computed = self.owner.is_computed(path)
            if computed and self.owner.may_write(path):
                self._effect()
            return Attribute(path=path, computed=computed)
        if isinstance(base, Constant):
            found = getattr(base.value, node.attr, None) if isinstance(base.value, types.ModuleType) else None
            return Constant(value=found) if is_torchs(found) else Leaf()
        return self._op(f".{node.attr}", (base,), {}, node)

    def _call(self, node: ast.Call, func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Value:
        target: Any = None
        receiver: tuple[Value, ...] = ()
        is_method = not self.owner.is_path(func) or self.owner.is_tensor(func)
        if isinstance(func, ast.Attribute) and is_method and not is_global(func, self.locals):
            target, receiver = f".{func.attr}()", (self.value(func.value),)
        else:
            called = self.value(func)
            if isinstance(func, ast.Name) and func.id in self.locals:
                receiver = (called,)  # a region's own statements have no such name
            elif isinstance(called, Attribute):
                target = f"self.{called.path}"
            elif isinstance(called, Constant) and callable(called.value):
                target = called.value
            else:
                receiver = (called,)
        starred = any(isinstance(arg, ast.Starred) for arg in args) or any(k.arg is None for k in keywords)
        values = (*receiver, *(self.value(a.value if isinstance(a, ast.Starred) else a) for a in args))
        named = {str(k.arg): self.value(k.value) for k in keywords}
        if target is None or starred or "out" in named:
            return self._opaque(*values, *named.values())
        return self._op(target, values, named, node)

    def _unknown(self, node: ast.AST) -> Value:
        """Something that is not understood, with all it mentions."""
        mentioned = [self._name(named) for named in ast.walk(node) if isinstance(named, ast.Name)]
        for stored in ast.walk(node):
            if isinstance(stored, ast.Name) and isinstance(stored.ctx, ast.Store):
                self.env[stored.id] = Leaf()
        return self._opaque(*mentioned)

    def _op(self, target: Any, args: tuple[Value, ...], keywords: dict[str, Value], node: Any) -> Op:
        order = self._next()
        found = Op([], target, args, keywords, node, order, self.stretch, self.statement, self.depth > 0)
        for value in (*args, *keywords.values()):
            value.users.append(found)
        self.ops.append(found)
        return found

    def _pure(self, *values: Value) -> Leaf:
        self._escape(*values)
        return Leaf()

    def _opaque(self, *values: Value) -> Leaf:
        self._escape(*values)
        self._effect()
        return Leaf()

    def _escape(self, *values: Value) -> None:
        for value in values:
            value.users.append(None)

    def _effect(self) -> None:
        self.effects.append(self._next())

    def _next(self) -> int:
        self.order += 1
        return self.order


def _are_names(elements: Sequence[ast.expr]) -> bool:
    return all(isinstance(element, ast.Name) for element in elements)


_UNKNOWN = object()
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_TRIES = (ast.Try, *([ast.TryStar] if sys.version_info >= (3, 11) else []))
_TORCH_MODULES = (torch, torch.nn, torch.nn.functional, torch.linalg)
_UNDER_ANOTHER_NAME = (abs, torch.linalg.norm, torch.linalg.vector_norm)


def is_torchs(value: Any) -> bool:
    """True for the modules of torch that are read, the functions in them, dtypes and builtins that take tensors."""
    if isinstance(value, types.ModuleType):
        return value in _TORCH_MODULES
    if isinstance(value, torch.dtype) or any(value is known for known in _UNDER_ANOTHER_NAME):
        return True
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and any(getattr(module, name, _UNKNOWN) is value for module in _TORCH_MODULES)
