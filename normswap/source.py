"""What the source of ONE forward says: the attributes of self it reads and every operation it writes down.

Whatever is not understood is rejected. The source does not show what an operation means, as a graph does not show what
Python read and burned in. A rule therefore demands both that the graph of ``tracing.trace`` is its pattern and that
every operation of the scan is one of the pattern's own, so that nothing can hide between the two.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from normswap.plan import Reason
from normswap.tracing import Rejection

_TORCH_MODULES = (torch, torch.nn, torch.nn.functional)
_BUILTINS = {"abs": builtins.abs}

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}

# For the sentence in a report; other constructs go by the name of their syntax node.
_WORDS = {
    "With": "a with block",
    "If": "an if",
    "For": "a loop",
    "While": "a loop",
    "AugAssign": "an in-place assignment",
    "Expr": "a statement whose result is not used",
}


@dataclass(frozen=True)
class Scan:
    """What a straight-line ``forward(self, argument)`` says.

    ``reads``: the attributes of self it reads, each once, in order. ``operations``: everything it computes, in order
    of evaluation: ``"abs"`` for a call of torch.abs, builtin abs or a method abs; ``"/"`` for an operator;
    ``"self.bn"`` for a call of an attribute of self; ``".shape"`` for an attribute of a value; ``"[]"`` for an index.
    """

    argument: str
    reads: tuple[str, ...]
    operations: tuple[str, ...]


# A forward's code is kept beside its scan: whoever assigns another __code__ gets another scan.
_scans: weakref.WeakKeyDictionary[Any, tuple[types.CodeType, Scan | Rejection]] = weakref.WeakKeyDictionary()


def source_tree(code: types.CodeType) -> ast.FunctionDef | None:
    """The definition of a function as its source file has it now, or None where there is none.

    Whether this is the code that runs, ``scan`` checks.
    """
    source = _source(code)
    for node in ast.walk(_parse(source)) if source else ():
        if isinstance(node, ast.FunctionDef) and (node.name, _first_line(node)) == (code.co_name, code.co_firstlineno):
            return node
    return None


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _source(code: types.CodeType) -> str:
    """The whole file that ``code`` was defined in, "" where there is none."""
    try:
        return "".join(inspect.findsource(code)[0])
    except (OSError, TypeError, IndexError):
        return ""  # the caller says so, with the place


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python has to say about the user's file, it said on import
            return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])  # the file was changed and is no Python now: no definition is found in it


def scan(forward: Any) -> Scan | Rejection:
    """Read the source of ``forward``: straight-line code of (self, one argument), or the reason why it is not.

    Understood are assignments to local names, one return, operators, calls, constants, attributes of self, and globals
    that are torch, torch.nn, torch.nn.functional or functions in them. The source is compiled and compared with the
    code that runs. The result is cached by function.
    """
    if not isinstance(forward, types.FunctionType):
        return Rejection(Reason.SOURCE, f"forward is a {type(forward).__name__}, not a plain function")
    known = _scans.get(forward)
    if known is None or known[0] is not forward.__code__:
        known = _scans[forward] = (forward.__code__, _scan(forward))
    return known[1]


def _scan(forward: types.FunctionType) -> Scan | Rejection:
    tree = definition(forward)
    if isinstance(tree, Rejection):
        return tree
    if (rejection := takes_another_argument(forward)) is not None:
        return rejection
    scanner = Scanner(forward)
    try:
        scanner.read_body(tree.body)
    except NotUnderstood as error:
        return Rejection(Reason.NOT_STRAIGHT_LINE, str(error))
    return Scan(forward.__code__.co_varnames[1], tuple(dict.fromkeys(scanner.reads)), tuple(scanner.operations))


def undecorated(function: types.FunctionType) -> types.FunctionType:
    """The function inside decorators that each hold the next one in exactly one cell, as functools.wraps ones do."""
    wrapped = function.__dict__.get("__wrapped__")
    held = sum(cell_holds(cell, wrapped) for cell in function.__closure__ or ())
    return undecorated(wrapped) if isinstance(wrapped, types.FunctionType) and held == 1 else function


def cell_holds(cell: types.CellType, value: Any) -> bool:
    """Whether ``value`` itself is in it; a cell may be empty."""
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


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


def takes_another_argument(forward: types.FunctionType) -> Rejection | None:
    """Why ``forward`` is not one of (self, input)."""
    if _takes_one_argument(forward):
        return None
    return Rejection(Reason.UNSUPPORTED, f"forward takes {inspect.signature(forward)}, not (self, input)")


def is_what_runs(code: types.CodeType) -> bool:
    """True when compiling the source file gives, at the line of ``code``, the same instructions, constants and names.
    The file is compiled whole: what a method compiles to depends on the imports and the class around it."""
    compiled = _compile(_source(code), code.co_filename).get((code.co_name, code.co_firstlineno))
    return compiled is not None and _fingerprint(compiled) == _fingerprint(code)


@functools.lru_cache(maxsize=8)
def _compile(source: str, filename: str) -> dict[tuple[str, int], types.CodeType]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            waiting = [compile(source, filename, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[str, int], types.CodeType] = {}
    while waiting:
        code = waiting.pop()
        found[code.co_name, code.co_firstlineno] = code
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found


def _fingerprint(code: types.CodeType) -> tuple[Any, ...]:
    # repr, because 1, 1.0 and True are equal
    constants = [_fingerprint(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _takes_one_argument(forward: types.FunctionType) -> bool:
    code = forward.__code__
    variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_argcount == 2 and not code.co_kwonlyargcount and not variadic and not forward.__defaults__


class NotUnderstood(Exception):
    """Something in a function that the scan does not understand."""


class Scanner(ast.NodeVisitor):
    """Walks a body in order of evaluation; raises NotUnderstood at the first node without a visit method."""

    def __init__(self, forward: types.FunctionType) -> None:
        self.globals = forward.__globals__
        self.locals = forward.__code__.co_varnames
        self.owner = self.locals[0]
        self.reads: list[str] = []
        self.operations: list[str] = []

    def read_body(self, body: Sequence[ast.stmt]) -> None:
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body = body[1:]
        for statement in body:
            if isinstance(statement, ast.Return) and statement is not body[-1]:
                self.generic_visit(statement)
            self.visit(statement)
        if not body or not isinstance(body[-1], ast.Return):
            raise NotUnderstood("forward does not end in a return")

    def generic_visit(self, node: ast.AST) -> NoReturn:
        name = type(node).__name__
        raise NotUnderstood(f"{_WORDS.get(name, name)} at line {getattr(node, 'lineno', '?')}")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.generic_visit(node)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._store(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._store(node.target)

    def _store(self, target: ast.expr) -> None:
        if not isinstance(target, ast.Name) or target.id == self.owner:
            raise NotUnderstood(f"a store to {ast.unparse(target)} at line {target.lineno}")

    def visit_Constant(self, node: ast.Constant) -> None:
        """A constant is no operation."""

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> None:
        for element in node.elts:
            self.visit(element)

    visit_List = visit_Tuple

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.visit(node.operand)
        if not isinstance(node.operand, ast.Constant):
            self.operations.append(ast.unparse(node)[:1])

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.visit(node.left)
        self.visit(node.right)
        self.operations.append(_SYMBOLS.get(type(node.op), type(node.op).__name__))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        self.visit(node.slice)
        self.operations.append("[]")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == self.owner or node.id not in self.locals:
            raise NotUnderstood(f"the name {node.id} at line {node.lineno}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_self(node.value):
            self.reads.append(node.attr)
        elif self._torch_value(node) is None:
            self.visit(node.value)
            self.operations.append(f".{node.attr}")

    def visit_Call(self, node: ast.Call) -> None:
        operation = self._callee(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                raise NotUnderstood(f"a starred argument at line {node.lineno}")
            self.visit(keyword.value)
        self.operations.append(operation)

    def _callee(self, func: ast.expr) -> str:
        function = self._torch_value(func)
        if function is not None:
            if isinstance(function, type) or not callable(function):
                raise NotUnderstood(f"a call of {ast.unparse(func)} at line {func.lineno}")
            return str(function.__name__)
        if not isinstance(func, ast.Attribute):
            self.visit(func)
            return "()"
        if self._is_self(func.value):
            self.reads.append(func.attr)
            return f"self.{func.attr}"
        self.visit(func.value)
        return func.attr

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.owner

    def _torch_value(self, node: ast.expr) -> Any:
        """What a global name or a chain of attributes on one stands for where that is torch's; None for what is not a
        global. Raises NotUnderstood for any other global."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            value = self.globals.get(node.id, _BUILTINS.get(node.id))
        elif isinstance(node, ast.Attribute):
            base = self._torch_value(node.value)
            if base is None:
                return None
            value = getattr(base, node.attr, None) if base in _TORCH_MODULES else None
        else:
            return None
        if not is_torchs(value):
            raise NotUnderstood(f"the name {ast.unparse(node)} at line {node.lineno}")
        return value


def is_torchs(value: Any) -> bool:
    """True for torch, torch.nn, torch.nn.functional, the functions in them, dtypes and builtins that take tensors."""
    if isinstance(value, types.ModuleType):
        return value in _TORCH_MODULES
    if isinstance(value, torch.dtype) or any(value is builtin for builtin in _BUILTINS.values()):
        return True
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and any(getattr(module, name, None) is value for module in _TORCH_MODULES)
