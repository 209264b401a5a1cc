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
from normswap.kinds import NORMS, Norm
from normswap.plans import Match
from normswap.source import definition, global_named, takes_another_argument


def match_subclass(module: nn.Module, kind: str) -> Match | None:
    """A Match when ``module``, of a subclass of the kind's torch.nn class, provably computes what that class does;
    its attribute "unless" names the flag under which it does not, if there is one. None: not provable."""
    norm, cls = NORMS[kind], type(module)
    expected = norm.classes[0]
    described = not norm.reads or any(inspect.getattr_static(cls, name, None) is not None for name in norm.parameters)
    called = (cls.__call__, cls._call_impl) == (nn.Module.__call__, nn.Module._call_impl)
    if described or not called or "forward" in module.__dict__ or own_getattr(module) is not None:
        return None
    if cls.forward is expected.forward:
        return Match(kind) if has_torchs_forward(expected) else None
    flag = _flag_of(cls.forward, norm)
    if not flag:
        return None if flag is None else Match(kind)
    return Match(kind, {"unless": flag}) if isinstance(module.__dict__.get(flag), bool) else None


def has_torchs_forward(expected: Any) -> bool:
    """False when some library replaced ``expected.forward`` for the whole process: its globals are then its own."""
    forward = expected.forward
    return isinstance(forward, types.FunctionType) and forward.__globals__ is sys.modules[expected.__module__].__dict__


def _flag_of(forward: Any, norm: Norm) -> str | None:
    """The attribute of self unless which ``forward`` returns the norm's function of its argument and all that the class
    keeps for it; "" where it always does, None where it does something else."""
    tree = definition(forward) if isinstance(forward, types.FunctionType) else None
    if not isinstance(tree, ast.FunctionDef) or takes_another_argument(forward) is not None:
        return None
    me, argument = forward.__code__.co_varnames[:2]
    flag, statements = "", tree.body[ast.get_docstring(tree) is not None :]
    match statements:
        case [ast.If(test=ast.Attribute(value=ast.Name(id=owner), attr=flag), orelse=otherwise), *rest] if owner == me:
            statements = [*otherwise, *rest]
    match statements:
        case [ast.Return(value=ast.Call() as call)]:
            pass
        case [ast.Assign(targets=[ast.Name(id=stored)], value=ast.Call() as call), ast.Return(value=ast.Name(id=name))]:
            if stored != name:
                return None
        case _:
            return None
    given = [argument, *(f"{me}.{name}" for name in norm.parameters)]
    same = [*map(ast.unparse, (*call.args, *call.keywords))] == given
    return flag if same and global_named(call.func, forward) is norm.function else None
