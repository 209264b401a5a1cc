"""Modules that autocast makes compute in 16 bits, whatever they are given: a norm that only such a one reads may be
rounded at once."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from normswap.attributes import Rejection, own_getattr
from normswap.forwards.plain import CONVOLUTIONS, calls_forward, is_plain, is_unhooked
from normswap.forwards.replaced import once_a_code
from normswap.installed import called_class
from normswap.regions.flow import SEES_LOCALS
from normswap.source import definition

_LOWERED = (nn.Linear, *CONVOLUTIONS)


def only_multiplies(child: Any) -> bool:
    """Whether ``child`` does nothing with its first argument but hand it to Linears and convolutions of torch.nn, as
    its class's forward before any swap is written. Asked on every call."""
    if (own := type(child)) in _LOWERED:
        return is_plain(child, own)
    cls = called_class(child) if isinstance(child, nn.Module) else own
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, types.FunctionType) or not calls_forward(cls) or not is_unhooked(child):
        return False
    if own_getattr(child) is not None:
        return False
    parts = [_part(child, name) for name in _fed(forward)]
    there = [part for part in parts if part is not None]  # nobody calls None: an optional part that is left out
    return bool(there) and all(type(part) in _LOWERED and is_plain(part, type(part)) for part in there)


def _part(module: nn.Module, name: str) -> Any:
    """``module.name``, a child or None; the module itself for anything else."""
    found: Any = vars(module).get(name, module._modules.get(name, module))
    hidden = hasattr(type(module), name) or (found is not None and name in vars(module))
    return module if hidden else found


@once_a_code
def _fed(forward: types.FunctionType) -> frozenset[str]:
    """The children that a forward hands its first argument to; none where it does anything else with it."""
    tree = definition(forward)
    if any("autocast" in name for name in forward.__code__.co_names):
        return frozenset()
    if isinstance(tree, Rejection) or len(arguments := [*tree.args.posonlyargs, *tree.args.args]) < 2:
        return frozenset()
    uses = _Uses(tree, arguments[0].arg, arguments[1].arg)
    try:
        uses.scan(tree.body)
    except _ElsewhereError:
        return frozenset()
    return frozenset(uses.children - {""})


class _ElsewhereError(Exception):
    """The argument is used in another way."""


class _Uses:
    """The uses of an argument until its name holds something else. ``known``: by a name's node, the child that is
    called with it, "" where its form is asked for."""

    def __init__(self, tree: ast.FunctionDef, owner: str, argument: str) -> None:
        self.argument, self.children, self.known = argument, set[str](), dict[int, str]()
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr=child), args=[ast.Name() as given], keywords=[]
                ) if name == owner:
                    self.known[id(given)] = child
                case (
                    ast.Call(func=ast.Attribute(value=ast.Name() as given, attr="size" | "dim" | "numel"))
                    | ast.Attribute(value=ast.Name() as given, attr="shape" | "ndim" | "device" | "is_cuda")
                ):
                    self.known[id(given)] = ""

    def scan(self, body: Sequence[ast.stmt]) -> bool:
        """Take in statements in order. True where the name then holds something else, whichever way was taken.
        Raises _ElsewhereError."""
        for node in body:
            match node:
                case ast.If(test=test, body=taken, orelse=otherwise):
                    self._check(test)
                    ways = [self.scan(taken), self.scan(otherwise)]
                    if all(ways):
                        return True
                case ast.AnnAssign(value=None):
                    pass
                case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                    self._check(value)
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if self._check(*targets, may_store=True):
                        return True
                case _:  # its parts may be run any number of times: the name must keep what it holds
                    self._check(node)
                    if isinstance(node, ast.Return):
                        return True
        return False

    def _check(self, *nodes: ast.AST, may_store: bool = False) -> bool:
        """Whether something is stored under the name. Raises _ElsewhereError for any other use that is not known."""
        stored = False
        for node in (part for one in nodes for part in ast.walk(one)):
            if isinstance(node, _OTHER_CODE) and any(self._is_it(part) for part in ast.walk(node)):
                raise _ElsewhereError  # who knows under what autocast it is run
            if isinstance(node, ast.Name) and node.id in SEES_LOCALS:
                raise _ElsewhereError
            if self._is_it(node):
                if may_store and isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
                    stored = True
                elif id(node) in self.known:
                    self.children.add(self.known[id(node)])
                else:
                    raise _ElsewhereError
        return stored

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.argument


_OTHER_CODE = (ast.With, ast.AsyncWith, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)
