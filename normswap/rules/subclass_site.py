"""Subclasses of torch.nn's norms that compute what their base class does: those without a forward of their own, and
those whose forward calls the very torch.nn.functional op with the base class's attributes, if need be unless a flag of
the instance is set (as timm's norms do). A GroupNorm may then hand its result to children of its own: an activation,
and nn.Identity (as timm's GroupNormAct does)."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.forwards.group_norm_activation import activation_of
from normswap.plan import Match, Reason, Refusal
from normswap.rules.source import is_what_runs, source_tree
from normswap.tracing import own_getattr

_CALLS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "layer_norm": (F.layer_norm, nn.LayerNorm, ("normalized_shape", "weight", "bias", "eps")),
    "rms_norm": (F.rms_norm, nn.RMSNorm, ("normalized_shape", "weight", "eps")),
    "group_norm": (F.group_norm, nn.GroupNorm, ("num_groups", "weight", "bias", "eps")),
}

SUBCLASSED = tuple(_CALLS)
"""The kinds whose subclasses are looked into."""


_ACTIVATED = "group_norm_activation"


def match_subclass(module: nn.Module, kind: str) -> Match | Refusal | None:
    """A Match when ``module``, of a subclass of the kind's torch.nn class, provably computes what that class does;
    its attribute "unless" names the flag under which it does not, if there is one. Where what a GroupNorm computes
    goes through children, a Match or Refusal of that kind. None: not provable."""
    _, expected, attributes = _CALLS[kind]
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
    flag, argument, children, call = body
    if flag is not None and not isinstance(module.__dict__.get(flag), bool):
        return None
    if not _is_the_call(call, argument, forward, kind):
        return None
    flagged = {} if flag is None else {"unless": flag}
    if not children:
        return Match(kind, flagged)
    if kind != "group_norm":
        return None
    return why_no_activation(module, children) or Match(_ACTIVATED, {"children": children, **flagged})


def why_no_activation(module: nn.Module, children: list[str]) -> Refusal | None:
    """Why calling these children of ``module`` one after the other is no activation that can be fused."""
    found = [module._modules.get(name) for name in children]
    if activation_of(found) is not None:
        return None
    names = (f"self.{name} ({type(child).__name__})" for name, child in zip(children, found, strict=True))
    wanted = "one nn.ReLU, nn.SiLU or nn.GELU without hooks, beside nn.Identity"
    return Refusal(_ACTIVATED, Reason.CHILD, f"{', '.join(names)}: {wanted} is fused")


def has_torchs_forward(expected: Any) -> bool:
    """False when some library replaced ``expected.forward`` for the whole process: its globals are then its own."""
    forward = expected.forward
    return isinstance(forward, types.FunctionType) and forward.__globals__ is sys.modules[expected.__module__].__dict__


def _body_of(forward: types.FunctionType) -> tuple[str | None, str, list[str], ast.expr] | None:
    """(flag, argument, children, expression) of a forward that returns the expression, handed through the children,
    unless ``self.flag``; None for others."""
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
    returned = _returned(statements, code)
    return None if returned is None else (flag, argument, *returned)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _attribute_of_self(node: ast.expr, code: types.CodeType) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == code.co_varnames[0]:
        return node.attr
    return None


def _returned(statements: list[ast.stmt], code: types.CodeType) -> tuple[list[str], ast.expr] | None:
    """(children, e) of ``return self.b(self.a(e))``, also with ``x = ...`` for any of the steps; None for others."""
    *before, last = statements or [ast.Pass()]
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    children, expression = list[str](), last.value
    while True:
        match expression:
            case ast.Call(func=func, args=[inner], keywords=[]) if (
                child := _attribute_of_self(func, code)
            ) is not None:
                children.insert(0, child)
                expression = inner
            case ast.Name(id=name) if before:
                match before.pop():
                    case ast.Assign(targets=[ast.Name(id=stored)], value=value) if stored == name:
                        expression = value
                    case _:
                        return None
            case _:
                return None if before else (children, expression)


def _is_the_call(node: ast.expr, argument: str, forward: types.FunctionType, kind: str) -> bool:
    """True for ``F.op(argument, self.a, self.b, ...)`` with all attributes of the base class, in order."""
    op, _, attributes = _CALLS[kind]
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
