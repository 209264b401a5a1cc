"""Subclasses of torch.nn's norms that compute what their base class does: those without a forward of their own, and
those whose forward calls the very torch.nn.functional op with the base class's attributes, if need be unless a flag of
the instance is set (as timm's norms do)."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

from torch import nn

from normswap.attributes import own_getattr
from normswap.kinds import NORMS
from normswap.plan import Match
from normswap.source import is_what_runs, source_tree

SUBCLASSED = tuple(norm.name for norm in NORMS.values() if norm.reads)
"""The kinds whose subclasses are looked into."""


def match_subclass(module: nn.Module, kind: str) -> Match | None:
    """A Match when ``module``, of a subclass of the kind's torch.nn class, provably computes what that class does;
    its attribute "unless" names the flag under which it does not, if there is one. None: not provable."""
    attributes, expected = NORMS[kind].parameters, NORMS[kind].classes[0]
    cls: Any = type(module)
    forward = cls.forward
    described = any(inspect.getattr_static(cls, name, None) is not None for name in attributes)
    if described or "forward" in module.__dict__ or cls.__call__ is not nn.Module.__call__:
        return None
    if own_getattr(module) is not None:
        return None
    if cls._call_impl is not nn.Module._call_impl or not isinstance(forward, types.FunctionType):
        return None
    if forward is expected.forward:
        return Match(kind) if has_torchs_forward(expected) else None
    body = _body_of(forward)
    if body is None:
        return None
    flag, argument, call = body
    if flag is not None and not isinstance(module.__dict__.get(flag), bool):
        return None
    if not _is_the_call(call, argument, forward, kind):
        return None
    flagged = {} if flag is None else {"unless": flag}
    return Match(kind, flagged)


def has_torchs_forward(expected: Any) -> bool:
    """False when some library replaced ``expected.forward`` for the whole process: its globals are then its own."""
    forward = expected.forward
    return isinstance(forward, types.FunctionType) and forward.__globals__ is sys.modules[expected.__module__].__dict__


def _body_of(forward: types.FunctionType) -> tuple[str | None, str, ast.expr] | None:
    """(flag, argument, expression) of a forward that returns the expression unless ``self.flag``; None for others."""
    code = forward.__code__
    if forward.__closure__ or forward.__kwdefaults__ or forward.__defaults__ or code.co_argcount != 2:
        return None
    tree = source_tree(code)
    if tree is None or tree.decorator_list or not is_what_runs(code):
        return None
    argument = code.co_varnames[1]
    statements = [s for s in tree.body if not _is_docstring(s)]
    flag = None
    if statements and isinstance(statements[0], ast.If):
        flag = _attribute_of_self(statements[0].test, code)
        if flag is None:
            return None
        statements = statements[0].orelse + statements[1:]
    returned = _returned(statements)
    return None if returned is None else (flag, argument, returned)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _attribute_of_self(node: ast.expr, code: types.CodeType) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == code.co_varnames[0]:
        return node.attr
    return None


def _returned(statements: list[ast.stmt]) -> ast.expr | None:
    """e of ``return e``, also of ``x = e`` and ``return x``; None for others."""
    match statements:
        case [ast.Return(value=ast.expr() as expression)]:
            return expression
        case [ast.Assign(targets=[ast.Name(id=stored)], value=value), ast.Return(value=ast.Name(id=name))]:
            return value if stored == name else None
    return None


def _is_the_call(node: ast.expr, argument: str, forward: types.FunctionType, kind: str) -> bool:
    """True for ``F.op(argument, self.a, self.b, ...)`` with all attributes of the base class, in order."""
    op, attributes = NORMS[kind].function, NORMS[kind].parameters
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 + len(attributes):
        return False
    first, *rest = node.args
    read = [_attribute_of_self(arg, forward.__code__) for arg in rest]
    return (
        isinstance(first, ast.Name)
        and first.id == argument
        and read == [*attributes]
        and _resolved(node, forward) is op
    )


def _resolved(call: ast.Call, forward: types.FunctionType) -> object:
    """The global that ``F.layer_norm``, ``torch.nn.functional.layer_norm`` or ``layer_norm`` is, None if unknown."""
    path: list[str] = []
    node = call.func
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    found = forward.__globals__.get(node.id) if isinstance(node, ast.Name) else None
    for name in reversed(path):
        found = getattr(found, name, None) if isinstance(found, types.ModuleType) else None
    return found
