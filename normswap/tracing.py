"""ONE module's own forward, read two ways: what its source says (``scan``) and what it computes (``trace``).

``scan`` lists every attribute of ``self`` that forward reads and every operation it writes down, and rejects whatever
it does not understand. ``trace`` runs forward once on fake tensors and returns the ATen graph. Neither is enough
alone: a graph does not show a value that Python read and burned in (a shape, a flag, a global), and a source does
not show what an operation means. A rule therefore demands both that the graph is its pattern and that every
operation of the scan is one of the pattern's own, so that nothing can hide between the two.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import tokenize
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normswap.plan import Reason

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
class Rejection:
    """Why a forward cannot be read or traced."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Scan:
    """What a straight-line ``forward(self, argument)`` says.

    ``reads``: the attributes of self it reads, each once, in order. ``operations``: everything it computes, in order of
    evaluation: ``"abs"`` for a call of torch.abs, builtin abs or a method abs; ``"/"`` for an operator; ``"self.bn"`` for
    a call of an attribute of self; ``".shape"`` for an attribute of a value; ``"[]"`` for a subscript.
    """

    argument: str
    reads: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """The ATen graph of one forward. ``inputs`` names the attribute path that feeds each placeholder
    (``"scale"``, ``"bn.weight"``); ``argument`` is the placeholder of the forward's own input."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, str]
    argument: fx.Node


# A forward's code is kept beside its scan: whoever assigns another __code__ gets another scan.
_scans: weakref.WeakKeyDictionary[Any, tuple[types.CodeType, Scan | Rejection]] = weakref.WeakKeyDictionary()


def source_tree(code: types.CodeType) -> ast.FunctionDef | None:
    """The definition of a function as its source file has it now, or None where there is none.

    Line numbers are those of the file. Whether this is the code that runs, ``scan`` checks.
    """
    try:
        lines, first = inspect.getsourcelines(code)
        # Not textwrap.dedent: it would alter strings that span lines, and with them the constants compared later.
        indented = lines[0][:1].isspace()
        body = ast.parse(("if True:\n" if indented else "") + "".join(lines)).body
    except (OSError, TypeError, IndexError, SyntaxError, ValueError, tokenize.TokenError):
        return None  # no source, or what stands there now is no definition: the caller says so
    if indented and isinstance(body[0], ast.If):
        body = body[0].body
    if not body or not isinstance(body[0], ast.FunctionDef):
        return None
    ast.increment_lineno(body[0], first - (2 if indented else 1))
    return body[0]


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
    if inspect.unwrap(forward) is not forward:
        return Rejection(Reason.NOT_STRAIGHT_LINE, "forward is wrapped by a decorator")
    code, tree = forward.__code__, source_tree(forward.__code__)
    if code.co_freevars:
        return Rejection(Reason.NOT_STRAIGHT_LINE, f"forward closes over {', '.join(code.co_freevars)}")
    if tree is None:
        return Rejection(Reason.SOURCE, f"no definition found at {code.co_filename}:{code.co_firstlineno}")
    if tree.decorator_list:
        return Rejection(Reason.NOT_STRAIGHT_LINE, "forward is decorated")
    if not _is_source_of(tree, code):
        return Rejection(Reason.SOURCE, f"{code.co_filename}:{tree.lineno} is not the code that runs")
    if not _takes_one_argument(forward):
        return Rejection(Reason.UNSUPPORTED, f"forward takes {inspect.signature(forward)}, not (self, input)")
    scanner = _Scanner(forward)
    try:
        scanner.read_body(tree.body)
    except _NotUnderstood as error:
        return Rejection(Reason.NOT_STRAIGHT_LINE, str(error))
    return Scan(code.co_varnames[1], tuple(dict.fromkeys(scanner.reads)), tuple(scanner.operations))


def _is_source_of(tree: ast.FunctionDef, code: types.CodeType) -> bool:
    """True when compiling ``tree`` gives the instructions, constants and names of ``code``."""
    module = compile(ast.Module([tree], []), code.co_filename, "exec", dont_inherit=True)
    compiled = [c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name]
    return len(compiled) == 1 and all(
        (c.co_code, c.co_names, c.co_varnames, repr(c.co_consts))  # repr: 1, 1.0 and True are equal
        == (code.co_code, code.co_names, code.co_varnames, repr(code.co_consts))
        for c in compiled
    )


def _takes_one_argument(forward: types.FunctionType) -> bool:
    code = forward.__code__
    variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_argcount == 2 and not code.co_kwonlyargcount and not variadic and not forward.__defaults__


class _NotUnderstood(Exception):
    """Something in a forward that the scan does not understand."""


class _Scanner(ast.NodeVisitor):
    """Walks a body in order of evaluation; raises _NotUnderstood at the first node without a visit method."""

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
        if not body or not isinstance(body[-1], ast.Return):
            raise _NotUnderstood("forward does not end in a return")
        for statement in body:
            if isinstance(statement, ast.Return) and statement is not body[-1]:
                self.generic_visit(statement)
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> NoReturn:
        name = type(node).__name__
        raise _NotUnderstood(f"{_WORDS.get(name, name)} at line {getattr(node, 'lineno', '?')}")

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
            raise _NotUnderstood(f"a store to {ast.unparse(target)} at line {target.lineno}")

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
            raise _NotUnderstood(f"the name {node.id} at line {node.lineno}")

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
                raise _NotUnderstood(f"a starred argument at line {node.lineno}")
            self.visit(keyword.value)
        self.operations.append(operation)

    def _callee(self, func: ast.expr) -> str:
        function = self._torch_value(func)
        if function is not None:
            if isinstance(function, type) or not callable(function):
                raise _NotUnderstood(f"a call of {ast.unparse(func)} at line {func.lineno}")
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
        global. Raises _NotUnderstood for any other global."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            value = self.globals.get(node.id, _BUILTINS.get(node.id))
        elif isinstance(node, ast.Attribute):
            base = self._torch_value(node.value)
            if base is None:
                return None
            value = getattr(base, node.attr, None) if base in _TORCH_MODULES else None
        else:
            return None
        if not _is_torchs(value):
            raise _NotUnderstood(f"the name {ast.unparse(node)} at line {node.lineno}")
        return value


def _is_torchs(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value in _TORCH_MODULES
    if isinstance(value, torch.dtype) or any(value is builtin for builtin in _BUILTINS.values()):
        return True
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and any(getattr(module, name, None) is value for module in _TORCH_MODULES)


def trace(
    module: nn.Module,
    scanned: Scan,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    training: bool,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Traced | Rejection:
    """The ATen graph of the module's class's forward for a fake input of ``shape`` and ``dtype`` in one mode.

    Forward runs on a twin that holds fakes of what ``scanned`` says is read and nothing else, so the module, its
    hooks, its buffers and the random state are never touched, and reading anything more fails. Children read must
    be leaves; they get the mode ``training`` too, and ``settings`` (child -> attribute -> value) in place of their own.
    Whoever calls this must have checked ``scanned.operations``: what they name is run.
    """
    if (rejection := _unreadable(module, scanned)) is not None:
        return rejection
    tensors = _tensors(module, scanned)

    def forward(values: list[Tensor], x: Tensor) -> Any:
        twin = _twin(module, scanned, dict(zip(tensors, values, strict=True)), training, settings or {})
        return type(module).forward(twin, x)

    try:
        with FakeTensorMode():
            fakes = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors.values()]
            x = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            graph = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(fakes, x).graph
    except Exception as error:  # noqa: BLE001  forward is the user's code: what it raises becomes the reason
        first_line = (str(error).splitlines() or [""])[0]
        return Rejection(Reason.TRACE, f"{type(error).__name__}: {first_line}")
    *placeholders, argument = [node for node in graph.nodes if node.op == "placeholder"]
    return Traced(graph, dict(zip(placeholders, tensors, strict=True)), argument)


def _unreadable(module: nn.Module, scanned: Scan) -> Rejection | None:
    """Why reading an attribute may give something else than the parameter, buffer or leaf registered by that name."""
    cls: Any = type(module)
    if scanned.reads and (cls.__getattr__, cls.__getattribute__) != (nn.Module.__getattr__, object.__getattribute__):
        return Rejection(Reason.UNSUPPORTED, f"{cls.__name__} has its own __getattr__")
    for name in scanned.reads:
        if name in module.__dict__ or inspect.getattr_static(cls, name, None) is not None:
            return Rejection(Reason.UNSUPPORTED, f"self.{name} is not a Parameter, a buffer or a child")
        child = module._modules.get(name)
        if child is None and not isinstance(_own_tensors(module).get(name), Tensor):
            return Rejection(Reason.UNSUPPORTED, f"self.{name} is not a Parameter, a buffer or a child")
        if child is not None and any(True for _ in child.children()):
            return Rejection(Reason.CHILD, f"self.{name} has children")
    return None


def _own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _tensors(module: nn.Module, scanned: Scan) -> dict[str, Tensor]:
    """Every tensor that the attributes read can reach, by path; tied ones appear once per path."""
    found: dict[str, Tensor | None] = {}
    for name in scanned.reads:
        child = module._modules.get(name)
        if child is None:
            found[name] = _own_tensors(module)[name]
        else:
            found.update({f"{name}.{key}": value for key, value in _own_tensors(child).items()})
    return {path: value for path, value in found.items() if value is not None}


def _twin(
    module: nn.Module,
    scanned: Scan,
    values: Mapping[str, Tensor],
    training: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin.__dict__["training"] = training
    for name in scanned.reads:
        child = module._modules.get(name)
        if child is None:
            twin._buffers[name] = values[name]
        else:
            leaf = _leaf_twin(child, name, values, training, settings.get(name, {}))
            twin.__dict__[name] = leaf.forward  # not the leaf: calling that would run global hooks
    return twin


def _leaf_twin(
    child: nn.Module, name: str, values: Mapping[str, Tensor], training: bool, settings: Mapping[str, Any]
) -> nn.Module:
    leaf: nn.Module = object.__new__(type(child))
    leaf.__dict__.update(child.__dict__)
    leaf.__dict__["_parameters"] = {key: values.get(f"{name}.{key}") for key in child._parameters}
    leaf.__dict__["_buffers"] = {key: values.get(f"{name}.{key}") for key in child._buffers}
    leaf.__dict__.update(settings, training=training)
    return leaf
