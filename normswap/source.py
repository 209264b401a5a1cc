"""The definition of a function, checked to be the code that runs."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
import warnings
from collections.abc import Container
from typing import Any, TypeAlias

from normswap.attributes import Rejection
from normswap.plans import Reason

_Place: TypeAlias = tuple[str, int]


def source_tree(code: types.CodeType) -> ast.FunctionDef | None:
    """The definition of a function as its source file has it now, or None where there is none.

    Whether this is the code that runs, ``definition`` checks.
    """
    return _in_its_file(code)[0]


def _in_its_file(code: types.CodeType) -> tuple[ast.FunctionDef | None, types.CodeType | None]:
    """What stands in its source file where ``code`` was defined, and the code that it compiles to there."""
    try:
        trees, codes = _read("".join(_lines(code)), code.co_filename)
    except (OSError, TypeError, IndexError):
        return None, None  # the caller says so, with the place
    place = code.co_name, code.co_firstlineno
    return trees.get(place), codes.get(place)


def _lines(code: types.CodeType) -> list[str]:
    """The file in which it was defined, as it is now. inspect asks every module that is imported whose file it is."""
    linecache.checkcache(code.co_filename)
    return linecache.getlines(code.co_filename) or inspect.findsource(code)[0]


@functools.lru_cache(maxsize=32)
def _read(source: str, filename: str) -> tuple[dict[_Place, ast.FunctionDef], dict[_Place, types.CodeType]]:
    """The functions in a file and their code, by names and first lines. It is compiled whole: what a method compiles to
    depends on the imports and the class around it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python has to say about the user's file, it said on import
            tree = ast.parse(source)
            waiting = [compile(source, filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}, {}  # the file was changed and is no Python now
    trees: dict[_Place, ast.FunctionDef] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not _is_deep(node):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            trees.setdefault((node.name, first), node)
    codes: dict[_Place, types.CodeType] = {}
    while waiting:
        code = waiting.pop()
        codes[code.co_name, code.co_firstlineno] = code
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return trees, codes


def _is_deep(tree: ast.AST) -> bool:
    """Whether what reads and copies syntax level by level, and calls itself for each, may run out of stack."""
    level = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)


_DEEPEST = 100


def undecorated(function: types.FunctionType) -> types.FunctionType:
    """The function inside decorators that each hold the next one in exactly one cell, as functools.wraps ones do, and
    only call it, or read its name, as PyTorch's do: another may then stand there."""
    wrapped, code = function.__dict__.get("__wrapped__"), function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = [name for name, cell in cells if content_of(cell) is wrapped]
    if not isinstance(wrapped, types.FunctionType) or len(held) != 1:
        return function
    torchs = str(function.__globals__.get("__name__")).startswith("torch.")
    return undecorated(wrapped) if torchs or _only_calls(code, held[0]) else function


def _only_calls(code: types.CodeType, name: str) -> bool:
    """Whether the body of a function does nothing with the one that ``name`` holds but call it, or read its name."""
    tree = source_tree(code)
    if tree is None or not is_what_runs(code):
        return False
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    known = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    known |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _NAMES}
    return all(id(node) in known for node in nodes if isinstance(node, ast.Name) and node.id == name)


_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def content_of(cell: types.CellType) -> Any:
    """What a cell holds; None where that is nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def definition(function: types.FunctionType, decorated: bool = False) -> ast.FunctionDef | Rejection:
    """The definition of a plain function, checked to be the code that runs; or why there is none to be trusted.
    ``decorated``: it is ``undecorated``."""
    name = function.__name__
    if inspect.unwrap(function) is not function:
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"{name} is wrapped by a decorator")
    code, tree = function.__code__, source_tree(function.__code__)
    if code.co_freevars:
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"{name} closes over {', '.join(code.co_freevars)}")
    if tree is None:
        return Rejection(Reason.SOURCE, f"no definition found at {code.co_filename}:{code.co_firstlineno}")
    if tree.decorator_list and not decorated:
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"{name} is decorated")
    if not is_what_runs(code):
        return Rejection(Reason.SOURCE, f"{code.co_filename}:{tree.lineno} is not the code that runs")
    return tree


def root_of(node: ast.AST) -> ast.AST:
    """``a`` of ``a.b.c``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def is_global(node: ast.expr, local: Container[str]) -> bool:
    """Whether ``a.b.c`` begins at a name that is none of the ``local`` ones."""
    root = root_of(node)
    return isinstance(root, ast.Name) and root.id not in local


def global_named(node: ast.expr, function: types.FunctionType) -> object:
    """What ``F.relu`` and the like stand for in ``function``: a global, or what a module that is one holds; None for
    anything else."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    code = function.__code__
    if not isinstance(node, ast.Name) or node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return None
    found = function.__globals__.get(node.id)
    for name in reversed(path):
        found = getattr(found, name, None) if isinstance(found, types.ModuleType) else None
    return found


def takes_another_argument(forward: types.FunctionType) -> Rejection | None:
    """Why ``forward`` is not one of (self, input)."""
    code = forward.__code__
    variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if code.co_argcount == 2 and not (code.co_kwonlyargcount or variadic or forward.__defaults__):
        return None
    return Rejection(Reason.UNSUPPORTED, f"forward takes {inspect.signature(forward)}, not (self, input)")


def is_what_runs(code: types.CodeType) -> bool:
    """Whether the source file compiles, at the line of ``code``, to the same instructions, constants and names."""
    compiled = _in_its_file(code)[1]
    return compiled is not None and _fingerprint(compiled) == _fingerprint(code)


def _fingerprint(code: types.CodeType) -> tuple[Any, ...]:
    # repr, because 1, 1.0 and True are equal
    constants = [_fingerprint(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
