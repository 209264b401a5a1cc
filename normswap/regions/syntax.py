"""The nodes of a syntax tree that is rewritten: found, given other operands, placed and compiled."""

from __future__ import annotations
import __future__

import ast
import types
from collections.abc import Sequence
from typing import Any

from normswap.plans import PlanError
from normswap.regions.spec import Node, Position, Step

PREFIX = "_normswap_"
MARK = "normswap_mark"


def mark_of(node: ast.AST) -> int:
    """Which node of the forward it is, or is a copy of; -1 for one that was made here."""
    return int(getattr(node, MARK, -1))


def node_at(tree: ast.FunctionDef, step: Step | Node) -> Any:
    """The node of a step. Raises PlanError where there is none."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)) and place_of(node, tree) == step.at:
            return node
    raise PlanError(f"regions: {tree.name} has no operation at {step.at}; plan it anew")


def place_of(node: Any, tree: ast.FunctionDef) -> Position:
    return node.lineno - tree.lineno, node.col_offset, node.end_lineno - tree.lineno, node.end_col_offset


def slots(node: Any, is_method: bool) -> list[ast.expr]:
    """The operands of an operation, in order."""
    if isinstance(node, ast.AugAssign):
        target: Any = node.target
        return [ast.copy_location(ast.Name(target.id, ast.Load()), node), node.value]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return [*([node.func.value] if is_method else []), *node.args, *(keyword.value for keyword in node.keywords)]


def fill(node: Any, is_method: bool, operands: list[Any]) -> None:
    """Give an operation other operands."""
    if isinstance(node, ast.AugAssign):
        node.target, node.value = ast.Name(operands[0].id, ast.Store()), operands[1]
        return
    if isinstance(node, ast.BinOp):
        node.left, node.right = operands
        return
    if is_method:
        node.func.value, *operands = operands
    node.args, named = operands[: len(node.args)], operands[len(node.args) :]
    for keyword, value in zip(node.keywords, named, strict=True):
        keyword.value = value


def placed(node: Any, where: ast.AST) -> Any:
    """``node``, its parts that have no place yet at that of ``where``."""
    for part in ast.walk(node):
        if "lineno" not in vars(part):
            ast.copy_location(part, where)
    return node


def made_function(name: str, arguments: list[str], body: list[Any], where: ast.AST) -> ast.FunctionDef:
    made: Any = ast.parse(f"def {name}({', '.join(arguments)}): pass").body[0]
    for part in ast.walk(made):  # it stands in no file
        for attribute in part._attributes:
            delattr(part, attribute)
    made.body = body
    return placed(made, where)  # type: ignore[no-any-return]


def codes_of(
    forward: types.FunctionType, functions: Sequence[ast.FunctionDef], helpers: Sequence[str]
) -> dict[str, types.CodeType]:
    """The code of each function by its name, compiled as methods of a class of the same name (private names depend on
    that) inside a function whose parameters are the helpers."""
    owner = ["", *forward.__qualname__.split(".")][-2]
    where, body = functions[0], list[ast.stmt](functions)
    if owner.isidentifier():  # else no class stands around it
        made: Any = ast.parse(f"global {owner}\nclass {owner}: pass").body  # global: the forward may name its class
        made[1].body, body = body, made
    outer = made_function(f"{PREFIX}factory", [*helpers], body, where)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = forward.__code__.co_flags & _FUTURES
    code = compile(module, forward.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    for _ in range(1 + owner.isidentifier()):  # into the factory, and into the class
        (code,) = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    found, waiting = dict[str, types.CodeType](), [code]
    wanted = {function.name for function in functions}
    while waiting:
        for constant in waiting.pop().co_consts:
            if isinstance(constant, types.CodeType):
                if constant.co_name in wanted:
                    found.setdefault(constant.co_name, constant)
                else:
                    waiting.append(constant)
    return found


_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
