"""What the code of a method mentions of the children of its module."""

from __future__ import annotations

import ast
import copy
from collections import Counter

_BY_ANY_NAME = frozenset(
    {"getattr", "_modules", "__dict__", "children", "modules", "named_children", "named_modules", "get_submodule"}
)


def may_be_any(names: frozenset[str]) -> bool:
    """Whether code with these names may reach a child that it does not name."""
    return not _BY_ANY_NAME.isdisjoint(names)


def attributes_in(tree: ast.FunctionDef) -> Counter[str] | None:
    """How often a method names each attribute, of whatever; None where it may call a child that it does not name: by a
    name that it computes, or by handing self on."""
    spelled = _Spelled().visit(copy.deepcopy(tree))
    attributes = [node for node in ast.walk(spelled) if isinstance(node, ast.Attribute)]
    names = [node for node in ast.walk(spelled) if isinstance(node, ast.Name)]
    owner = next(argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args))
    read = {id(node.value) for node in attributes}
    handed_on = any(name.id == owner and id(name) not in read for name in names)
    if handed_on or may_be_any(frozenset([*(n.attr for n in attributes), *(n.id for n in names)])):
        return None
    return Counter(node.attr for node in attributes)


class _Spelled(ast.NodeTransformer):
    """``getattr(owner, "name", None)`` as ``owner.name``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name() as owner, ast.Constant(value=str() as name), *default],
                keywords=[],
            ) if all(isinstance(one, ast.Constant) for one in default):
                return ast.Attribute(owner, name, ast.Load())
        return self.generic_visit(node)
