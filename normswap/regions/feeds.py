"""Modules that autocast makes compute in 16 bits, whatever they are given: a norm that only such a one reads may be
rounded at once."""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from normswap.attributes import Rejection, own_getattr
from normswap.forwards.plain import CONVOLUTIONS, calls_forward, is_plain, is_unhooked
from normswap.forwards.replaced import once_a_code
from normswap.installed import called_class
from normswap.ops.dispatch import PLAIN
from normswap.regions.flow import SEES_LOCALS
from normswap.source import definition, root_of

_LOWERED = (nn.Linear, *CONVOLUTIONS)
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def only_multiplies(child: Any) -> bool:
    """Whether ``child`` does nothing with its first argument but hand it to Linears and convolutions of torch.nn, as
    its class's forward before any swap is written. Asked on every call."""
    if (own := type(child)) in _LOWERED:
        return _is_product(child)
    cls = called_class(child) if isinstance(child, nn.Module) else own
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, types.FunctionType) or not calls_forward(cls) or not is_unhooked(child):
        return False
    if own_getattr(child) is not None:
        return False
    fed, before = _read(forward)
    if any(not name or hasattr(cls, name) for name in before):  # which may put anything in their places
        return False
    parts = [_part(child, name) for name in fed]
    there = [part for part in parts if part is not None]  # nobody calls None: an optional part that is left out
    return bool(there) and all(type(part) in _LOWERED and _is_product(part) for part in there)


def _is_product(module: Any) -> bool:
    """Whether calling it is PyTorch's product of plain tensors: others may see their input before autocast does."""
    own = vars(module)
    held = (own.get(name, own["_parameters"].get(name)) for name in ("weight", "bias"))
    return is_plain(module, type(module)) and all(one is None or type(one) in PLAIN for one in held)


def _part(module: nn.Module, name: str) -> Any:
    """``module.name``, a child or None; the module itself for anything else."""
    found: Any = vars(module).get(name, module._modules.get(name, module))
    hidden = hasattr(type(module), name) or (found is not None and name in vars(module))
    return module if hidden else found


@once_a_code
def _read(forward: types.FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """The children that a forward hands its first argument to, none where it does anything else with it, and what else
    of self it may call before."""
    tree, code, nothing = definition(forward), forward.__code__, (frozenset[str](), frozenset[str]())
    if code.co_flags & _LATER or any("autocast" in name for name in code.co_names):
        return nothing
    if isinstance(tree, Rejection) or len(arguments := [*tree.args.posonlyargs, *tree.args.args]) < 2:
        return nothing
    uses = _Uses(tree, arguments[0].arg, arguments[1].arg)
    try:
        uses.scan(tree.body)
    except _ElsewhereError:
        return nothing
    return frozenset(uses.children - {""}), frozenset(uses.before)


class _ElsewhereError(Exception):
    """The argument is used in another way."""


class _Uses:
    """The uses of an argument until its name holds something else. ``known``: by a name's node, the child that is
    called with it, "" where its form is asked for. ``before``: what of self may be called before the last of them,
    "" if a function may be that is not Python's; ``called`` so far; ``touched``: self may have been changed in another
    way."""

    def __init__(self, tree: ast.FunctionDef, owner: str, argument: str) -> None:
        self.argument, self.children, self.known = argument, set[str](), dict[int, str]()
        self.owner, self.before, self.called, self.touched = owner, set[str](), set[str](), False
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
                    self._check(value, ordered=True)
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if self._check(*targets, may_store=True):
                        return True
                case _:  # its parts may be run any number of times: the name must keep what it holds
                    self._check(node, ordered=isinstance(node, (ast.Return, ast.Expr)))
                    if isinstance(node, ast.Return):
                        return True
        return False

    def _check(self, *nodes: ast.AST, may_store: bool = False, ordered: bool = False) -> bool:
        """Whether something is stored under the name. Raises _ElsewhereError for any other use that is not known.
        ``ordered``: of parts within each other the inner is run first, and each once."""
        self._note_changes(nodes, ordered)
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

    def _note_changes(self, nodes: Sequence[ast.AST], ordered: bool) -> None:
        """Take in what may change self. Raises _ElsewhereError where a child is called with the argument behind it."""
        parts = [part for one in nodes for part in ast.walk(one)]
        uses = {id(part) for part in parts if self._is_it(part) and self.known.get(id(part))}
        ordered = ordered and not any(isinstance(part, ast.comprehension) for part in parts)
        read, later = set[int](), set[str]()

        def note(call: ast.Call, name: str) -> None:
            behind = ordered and uses <= {id(one) for one in ast.walk(call)}
            (later if behind else self.called).add(name)

        for part in parts:
            match part:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=self.owner) as name, attr=called)):
                    read.add(id(name))
                    note(part, called)
                case ast.Call(func=ast.Name(id=called)) if called not in vars(builtins):
                    note(part, "")
                case ast.Call(func=ast.Attribute(value=ast.Attribute() as held)) if self._is_owner(root_of(held)):
                    self.touched = True
                case ast.Attribute(value=ast.Name(id=self.owner) as name, ctx=ast.Load()):
                    read.add(id(name))
                case ast.Attribute(ctx=ast.Store() | ast.Del()) if self._is_owner(root_of(part)):
                    self.touched = True
        self.touched |= any(self._is_owner(part) and id(part) not in read for part in parts)
        if uses and self.touched:
            raise _ElsewhereError
        self.before |= self.called if uses else set()
        self.called |= later

    def _is_owner(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.owner

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.argument


_OTHER_CODE = (ast.With, ast.AsyncWith, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.GeneratorExp)
