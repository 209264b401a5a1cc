"""What every rule about an expression asks before it reads a forward closely.

*Recognising* is cheap and lenient: does the source hold something of the pattern's shape? It decides only whether the
report should speak of this module at all. *Judging* (in each rule, by ``regions.straight``) is exact and decides what
is swapped.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator

from torch import fx, nn
from torch.nn.utils import parametrize

from normswap import source
from normswap.forwards.replaced import code_of, once_a_code
from normswap.plans import Reason, Refusal
from normswap.regions.straight import method_of
from normswap.rules.module_site import is_ours, parametrized_names, why_replaced

DIVISION = frozenset({"/", "div", "divide", "true_divide"})
MULTIPLICATION = frozenset({"*", "mul", "multiply"})
ABS = frozenset({"abs", "absolute"})


def class_forward(module: nn.Module) -> types.FunctionType | None:
    """The plain function behind ``type(module).forward``; None where there is none, or the module is ours."""
    return None if is_ours(module) else method_of(type(module), "forward")


@once_a_code
def names_in(forward: types.FunctionType) -> frozenset[str]:
    """Every global and attribute name in the code of ``forward``, seen through decorators, and in code inside it."""
    codes, names = [code_of(inspect.unwrap(forward))], set[str]()
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            names.update(code.co_names)
            codes.extend(code.co_consts)
    return frozenset(names)


def flow_of(forward: types.FunctionType) -> Flow | None:
    """That of ``forward``, seen through decorators; None where there is no source."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    tree = source.source_tree(code) if isinstance(code, types.CodeType) else None
    return None if tree is None else Flow(tree)


def not_rewritable(module: nn.Module, kind: str) -> Refusal | None:
    """Why a module whose class's forward is recognised must not be given another class."""
    if parametrize.is_parametrized(module):
        return Refusal(kind, Reason.PARAMETRIZED, parametrized_names(module))
    if (replaced := why_replaced(module)) is not None:
        return Refusal(kind, replaced)
    if isinstance(module, fx.GraphModule):
        return Refusal(kind, Reason.UNSUPPORTED, "a torch.fx.GraphModule writes its class anew on recompile()")
    return None


class Flow:
    """Which expressions of a function may flow into which, through its local names. Control flow and the order of
    assignments are ignored: enough to recognise a shape, not to judge it."""

    def __init__(self, tree: ast.FunctionDef) -> None:
        self.nodes = list(ast.walk(tree))
        self._assigned: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        value = node if isinstance(node, ast.AugAssign) else node.value
                        self._assigned.setdefault(target.id, []).append(value)

    def into(self, *expressions: ast.AST) -> Iterator[ast.AST]:
        """Every node that may flow into any of ``expressions``, themselves included."""
        waiting, followed = list(expressions), set[str]()
        while waiting:
            for node in ast.walk(waiting.pop()):
                yield node
                if isinstance(node, ast.Name) and node.id not in followed:
                    followed.add(node.id)
                    waiting.extend(self._assigned.get(node.id, ()))

    def calls(self, names: frozenset[str], *within: ast.AST) -> Iterator[ast.Call]:
        """The calls of a function or method of one of ``names`` that flow into ``within``."""
        for node in self.into(*within):
            if isinstance(node, ast.Call) and called_name(node) in names:
                yield node


def called_name(call: ast.Call) -> str | None:
    """``f`` for ``f(...)`` and ``anything.f(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None
