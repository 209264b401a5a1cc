"""Modules that autocast makes compute in 16 bits, whatever they are given: a norm that only such a one reads may be
rounded at once."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from normswap.attributes import Rejection
from normswap.forwards.plain import calls_forward, is_plain, is_unhooked
from normswap.installed import original_class
from normswap.regions.foldings import CONVOLUTIONS
from normswap.source import definition

_LOWERED = (nn.Linear, *CONVOLUTIONS)
_HARMLESS = frozenset({"shape", "ndim", "device", "is_cuda"})
_HARMLESS_CALLS = frozenset({"size", "dim", "numel"})
_SEES_LOCALS = frozenset({"locals", "vars", "eval", "exec", "super"})


def only_multiplies(child: Any) -> bool:
    """Whether ``child`` does nothing with its first argument but hand it to Linears and convolutions of torch.nn, as
    its class's forward before any swap is written. Asked on every call."""
    if (own := type(child)) in _LOWERED:
        return is_plain(child, own)
    cls = original_class(child) if isinstance(child, nn.Module) else own
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, types.FunctionType) or not calls_forward(cls) or not is_unhooked(child):
        return False
    names = _fed_by(forward)
    return bool(names) and all(_is_lowered(child, name) for name in names)


def _is_lowered(module: nn.Module, name: str) -> bool:
    child = module._modules.get(name)
    cls = type(child)
    hidden = name in module.__dict__ or hasattr(type(module), name)
    return cls in _LOWERED and not hidden and is_plain(child, cls)


_known: dict[types.FunctionType, tuple[types.CodeType, frozenset[str]]] = {}


def _fed_by(forward: types.FunctionType) -> frozenset[str]:
    """``_fed``, read once for each code that the function has."""
    known = _known.get(forward)
    if known is None or known[0] is not forward.__code__:
        known = _known[forward] = forward.__code__, _fed(forward)
    return known[1]


def _fed(forward: types.FunctionType) -> frozenset[str]:
    """The children that a forward hands its first argument to; none where it does anything else with it."""
    tree = definition(forward)
    if any("autocast" in name for name in forward.__code__.co_names):
        return frozenset()
    if isinstance(tree, Rejection) or len(arguments := [*tree.args.posonlyargs, *tree.args.args]) < 2:
        return frozenset()
    uses = _Uses(arguments[0].arg, arguments[1].arg)
    try:
        uses.scan(tree.body)
    except _ElsewhereError:
        return frozenset()
    return frozenset(uses.children)


class _ElsewhereError(Exception):
    """The argument is used in another way."""


class _Uses:
    """The uses of an argument until its name holds something else."""

    def __init__(self, owner: str, argument: str) -> None:
        self.owner, self.argument = owner, argument
        self.children: set[str] = set()

    def scan(self, body: Sequence[ast.stmt]) -> bool:
        """Take in statements in order. True where the name then holds something else, whichever way was taken.
        Raises _ElsewhereError."""
        return any(self._rebinds(statement) for statement in body)

    def _rebinds(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._check(value)
                return self._store(*targets)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._check(value)
                return value is not None and self._store(target)
            case ast.If(test=test, body=body, orelse=orelse):
                self._check(test)
                ways = [self.scan(body), self.scan(orelse)]
                return all(ways)
            case ast.Expr() | ast.Return():
                self._check(node)
                return isinstance(node, ast.Return)
            case _:  # its parts may be run any number of times: the name must keep what it holds
                self._check(node)
                if any(isinstance(n, ast.Name) and n.id == self.argument and _stores(n) for n in ast.walk(node)):
                    raise _ElsewhereError
                return False

    def _store(self, *targets: ast.expr) -> bool:
        """Whether one of these is the name."""
        names = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name) and _stores(n)]
        for target in targets:
            self._check(target)  # an index or the owner of an attribute
        return any(name.id == self.argument for name in names)

    def _check(self, node: ast.AST) -> None:
        """Raise _ElsewhereError for a use of the argument that is not as it should be."""
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=self.owner), attr=child), args=[ast.Name(id=name)], keywords=[]
            ) if name == self.argument:
                self.children.add(child)
                return
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.argument:
                if attribute in _HARMLESS:
                    return
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), args=args) if (
                name == self.argument and method in _HARMLESS_CALLS
            ):
                for argument in args:
                    self._check(argument)
                return
            case ast.Name(id=name):
                if name in _SEES_LOCALS or (name == self.argument and not _stores(node)):
                    raise _ElsewhereError
            case ast.NamedExpr(target=ast.Name(id=name)) if name == self.argument:
                raise _ElsewhereError
            case ast.With() | ast.AsyncWith() | ast.Lambda() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if any(isinstance(n, ast.Name) and n.id == self.argument for n in ast.walk(node)):
                    raise _ElsewhereError  # who knows under what autocast it is run
        for child_node in ast.iter_child_nodes(node):
            self._check(child_node)


def _stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
