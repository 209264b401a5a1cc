"""Calls of ``modulate(x, shift, scale)``, a function of one line beside the model, read as the line itself."""

from __future__ import annotations

import ast
import copy
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from normswap.attributes import Rejection
from normswap.source import definition

_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.Tuple, ast.expr_context)


def inlined(
    tree: ast.FunctionDef, names: Mapping[str, Any], chosen: Callable[[ast.Call], bool] = lambda call: True
) -> tuple[ast.FunctionDef, dict[str, types.FunctionType]]:
    """``tree``, or a copy with the calls that are ``chosen`` replaced, and the functions they called by name; ``names``
    are the globals. The sum has the place of the call, the product one that ends a character earlier."""
    nodes = [*ast.walk(tree)]
    locals_ = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    # Of arguments, definitions, imports, handlers and patterns, also those inside.
    locals_ |= {str(getattr(node, name, "")) for node in nodes for name in ("arg", "name", "asname", "rest")}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    functions = [names.get(name) for name in called - locals_]
    if not any(isinstance(one, types.FunctionType) and _line_of(one) is not None for one in functions):
        return tree, {}
    inliner = _Inliner({name: value for name, value in names.items() if name not in locals_}, chosen)
    made = inliner.visit(copy.deepcopy(tree))
    return made, inliner.found


class _Inliner(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, Any], chosen: Callable[[ast.Call], bool]) -> None:
        self.names, self.chosen = names, chosen
        self.found: dict[str, types.FunctionType] = {}

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = self.names.get(node.func.id) if isinstance(node.func, ast.Name) else None
        line = _line_of(function) if isinstance(function, types.FunctionType) else None
        if line is None or not _fits(node, line[0]) or not self.chosen(node):
            return node
        parameters, body = line
        assert isinstance(node.func, ast.Name)
        self.found[node.func.id] = function  # type: ignore[assignment]
        given = dict(zip(parameters, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
        new: Any = _Filler(given, node).visit(copy.deepcopy(body))
        new.left.end_col_offset -= 1
        return new


class _Filler(ast.NodeTransformer):
    """Puts what a call is given in the place of the parameters; all that is made stands where the call stood."""

    def __init__(self, given: Mapping[str, ast.expr], call: ast.Call) -> None:
        self.given, self.call = given, call

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return self.given[node.id]
        return super().visit(ast.copy_location(node, self.call) if hasattr(node, "lineno") else node)


def _fits(call: ast.Call, parameters: list[str]) -> bool:
    """Whether every parameter is given, and but the first by something whose moment is all the same."""
    rest = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    names = [*parameters[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
    simple = all(isinstance(part, _SIMPLE) for node in rest for part in ast.walk(node))
    return bool(call.args) and simple and sorted(map(str, names)) == sorted(parameters)


def _line_of(function: types.FunctionType) -> tuple[list[str], ast.BinOp] | None:
    """The parameters of ``function`` and what it returns, where that is ``x * (1 + s) + t`` of its parameters, each
    once, x the first; s and t may be unsqueezed."""
    if str(function.__module__).partition(".")[0] == "torch" or function.__defaults__ or function.__kwdefaults__:
        return None
    tree = definition(function)
    if isinstance(tree, Rejection):
        return None
    parameters = [argument.arg for argument in tree.args.args]
    match tree.body[ast.get_docstring(tree) is not None :]:
        case [ast.Return(value=ast.BinOp() as line)] if len(parameters) == 3:
            return (parameters, line) if ast.unparse(line) in _lines(*parameters) else None
    return None


def _lines(x: str, *others: str) -> Iterator[str]:
    """The ways to write it."""
    for scale, shift in itertools.permutations(others):
        for s, t, one in itertools.product(_in_rows(scale), _in_rows(shift), ("1", "1.0")):
            yield from (f"{x} * ({one} + {s}) + {t}", f"{x} * ({s} + {one}) + {t}")


def _in_rows(name: str) -> tuple[str, ...]:
    return name, f"{name}.unsqueeze(1)", f"{name}[:, None]"
