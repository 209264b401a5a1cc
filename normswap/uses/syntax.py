"""What is asked of the syntax of a function, whatever its values are."""

from __future__ import annotations

import ast
import copy
import dis
import functools
import re
import types
from typing import TypeGuard

from normswap.source import source_tree
from normswap.uses.values import Many, Value


@functools.lru_cache(maxsize=256)
def spelled(code: types.CodeType) -> tuple[dict[ast.AST, ast.AST], list[ast.expr], frozenset[str]]:
    """What stands around each node of a function, the names that it reads, super() among them, and those of names that
    are not its own."""
    found = source_tree(code)
    assert found is not None, "what is read has a source"
    tree = _Spelled().visit(copy.deepcopy(found))
    nodes = [*ast.walk(tree)]
    names: list[ast.expr] = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    names += [node for node in nodes if is_super(node)]
    outer = [name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names]
    return {child: node for node in nodes for child in ast.iter_child_nodes(node)}, names, frozenset(outer)


def is_super(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it is a call of super()."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


class _Spelled(ast.NodeTransformer):
    """``getattr(x, "name")`` as ``x.name``, with a default as that ``or`` the default."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as name), *rest]):
                return ast.BoolOp(ast.Or(), [ast.Attribute(value, name, ast.Load()), *rest])
        return node


def parameter_of(function: types.FunctionType, call: ast.Call, node: ast.AST, given: int) -> str | None:
    """The parameter that gets an argument of a call, behind as many as are ``given`` already."""
    code = function.__code__
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    if isinstance(node, ast.keyword):
        names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return node.arg if node.arg in names else None
    names, place = code.co_varnames[: code.co_argcount], call.args.index(node) + given  # type: ignore[arg-type]
    return names[place] if place < len(names) else None


def as_the_first(code: types.CodeType, value: Value) -> tuple[str, Value]:
    """The parameter that gets what is given first, and what it is then: that of ``*args`` where there is no other."""
    if code.co_argcount:
        return code.co_varnames[0], value
    return "".join(code.co_varnames[code.co_kwonlyargcount :][:1]), Many(value)


def reads(code: types.CodeType, name: str) -> bool:
    """Whether a function uses its parameter of that name at all."""
    return any(name in re.findall(r"\w+", str(step.argval)) for step in dis.get_instructions(code))


def goes_to_the_first(call: ast.Call) -> bool:
    """Whether it gives the first of what is gone through, or goes through it."""
    return isinstance(call.func, ast.Name) and call.func.id in ("iter", "next")
