"""A forward with calls of helpers where its regions were, compiled from its own syntax tree.

The last node of a region becomes ``helper(self, packed)``; every other node hands on its operands, in tuples where it
has two, so that all else is evaluated when and where it was. Nodes keep their lines, the code its file: tracebacks and
debuggers show the user's source.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from normswap.plan import PlanError
from normswap.regions.inline import inlined
from normswap.regions.patterns import FUNCTIONS
from normswap.regions.spec import Position, Region, Step
from normswap.source import definition
from normswap.tracing import Rejection

_PREFIX = "_normswap_"
_MARK = "normswap_mark"
_PARAMETERS = dict(FUNCTIONS.values())

Helper = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Compiled:
    """What is compiled of one region.

    ``snippet(self, packed)``: its own statements, which give its result or, where the sum is shared, (sum, result);
    ``stepped(self, packed, each)``: the same, ``each(step, value)`` in place of what each step gives;
    ``unpack(packed)``: (x, added before, added behind, scale, shift, arguments of the norm after its input);
    ``arguments(self)``: the latter, where they depend on self alone;
    ``callees()``: the functions that its steps call now, which anybody may have replaced.
    """

    region: Region
    snippet: Callable[[Any, Any], Any]
    stepped: Callable[[Any, Any, Callable[[int, Any], Any]], Any]
    unpack: Callable[[Any], tuple[Any, ...]]
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    callees: Callable[[], tuple[Any, ...]] = tuple


def compile_regions(
    forward: types.FunctionType, regions: Sequence[Region]
) -> tuple[list[Compiled], Callable[[Sequence[Helper]], types.FunctionType]]:
    """The regions compiled, and what makes the forward from a helper for each.

    Raises PlanError where ``forward`` has no source now, or holds no such nodes.
    """
    found = definition(forward)
    if isinstance(found, Rejection):
        raise PlanError(f"regions: {found.detail}; plan it anew")
    places = {step.at for region in regions for step in region.steps}
    tree, _ = inlined(found, forward.__globals__, lambda call: _place(call, found) in places)
    for key, node in enumerate(ast.walk(tree)):  # so that copies of them can be told
        setattr(node, _MARK, key)
    made = [_Region(tree, forward, index, region) for index, region in enumerate(regions)]
    edits: dict[int, ast.AST] = {}
    for one in made:
        edits |= one.edits()
    rewritten = _Rewriter(edits).visit(copy.deepcopy(tree))
    functions = [rewritten, *(f for one in made for f in one.functions())]
    code = _codes(forward, functions, [one.helper for one in made])
    compiled = []
    for one in made:
        names = [name for name in ("snippet", "stepped", "unpack", "arguments", "callees") if one.named(name) in code]
        found_code = {name: types.FunctionType(code[one.named(name)], forward.__globals__) for name in names}
        compiled.append(Compiled(one.region, **found_code))

    def make(helpers: Sequence[Helper]) -> types.FunctionType:
        cells = {one.helper: types.CellType(helper) for one, helper in zip(made, helpers, strict=True)}
        body = code[forward.__code__.co_name]
        closure = tuple(cells[name] for name in body.co_freevars)
        new = types.FunctionType(body, forward.__globals__, forward.__name__, forward.__defaults__, closure)
        new.__kwdefaults__, new.__qualname__ = forward.__kwdefaults__, forward.__qualname__
        new.__annotations__, new.__doc__ = forward.__annotations__, forward.__doc__
        new.__module__ = forward.__module__
        return new

    return compiled, make


class _Rewriter(ast.NodeTransformer):
    """Puts the edits in place: what stands for a marked node may hold nodes that are edited themselves."""

    def __init__(self, edits: dict[int, ast.AST]) -> None:
        self.edits = edits

    def visit(self, node: ast.AST) -> Any:
        edit = self.edits.get(_mark(node))
        return self.generic_visit(node) if edit is None else self.visit(copy.deepcopy(edit))


class _Region:
    """The nodes of one region in the tree of its forward."""

    def __init__(self, tree: ast.FunctionDef, forward: types.FunctionType, index: int, region: Region) -> None:
        self.region, self.index = region, index
        self.owner = forward.__code__.co_varnames[0]
        self.locals = {*forward.__code__.co_varnames, *forward.__code__.co_cellvars}
        self.helper, self.result = self.named("region"), self.named("result")
        self.nodes = [_at(tree, step) for step in region.steps]
        self.tree = tree

    def named(self, what: str) -> str:
        return f"{_PREFIX}{what}_{self.index}"

    # --- the forward ----------------------------------------------------------------------------------------------

    def edits(self) -> dict[int, ast.AST]:
        """What stands for each node, by its mark; the nodes within are the originals."""
        found: dict[int, ast.AST] = {}
        last = len(self.nodes) - 1
        for position, (step, node) in enumerate(zip(self.region.steps, self.nodes, strict=True)):
            handed = self._handed_on(step, node)
            if position == 0 and self.region.shared:
                statement = next(s for s in ast.walk(self.tree) if isinstance(s, ast.Assign) and s.value is node)
                (name,) = statement.targets
                both = ast.Tuple([name, ast.Name(self.result, ast.Store())], ast.Store())
                found[_mark(statement)] = _placed(ast.Assign([both], self._call(handed)), statement)
                continue
            if position == last:
                handed = ast.Name(self.result, ast.Load()) if self.region.shared else self._call(handed)
            new: ast.AST = handed
            if isinstance(node, ast.AugAssign):
                new = ast.Assign([node.target], handed)
            found[_mark(node)] = _placed(new, node)
        return found

    def _call(self, packed: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(self.helper, ast.Load()), [ast.Name(self.owner, ast.Load()), packed], [])

    def _handed_on(self, step: Step, node: Any) -> ast.expr:
        """The operands of a step, which nobody computes with yet."""
        operands = _operands(step, node)
        if step.does == "gain":
            operands[1 - step.operand] = _not_one(operands[1 - step.operand])
        if step.does in ("sum", "residual", "gain", "shift"):
            return ast.Tuple(operands, ast.Load())
        if step.does == "norm" and not self.region.type:
            return ast.Tuple([operands[0], *self._arguments(node)], ast.Load())
        return operands[step.operand]

    def _arguments(self, node: ast.Call) -> list[ast.expr]:
        """What a function is called with behind its input, in order; absent ones are its defaults."""
        names = _PARAMETERS[self.region.kind][1:]
        given = dict(zip(names, node.args[1:], strict=False)) | {str(k.arg): k.value for k in node.keywords}
        eps = None if self.region.kind == "rms_norm" else 1e-5
        return [given.get(name, ast.Constant(eps if name == "eps" else None)) for name in names]

    # --- the snippet and what unpacks -----------------------------------------------------------------------------

    def functions(self) -> list[ast.FunctionDef]:
        target, names = self._target()
        packed, where = self.named("packed"), self.nodes[0]
        unpacked = _placed(ast.Assign([target], ast.Name(packed, ast.Load())), where)
        roles = [names.get(role) for role in ("x", "before", "behind", "scale", "shift")]
        loads: list[ast.expr] = [ast.Name(name, ast.Load()) if name else ast.Constant(None) for name in roles]
        loads.append(ast.Tuple([ast.Name(name, ast.Load()) for name in names["arguments"]], ast.Load()))
        snippet, stepped = [unpacked, *self._statements(names)], [unpacked, *self._statements(names, "each")]
        unpack = [unpacked, ast.Return(ast.Tuple(loads, ast.Load()))]
        found = [
            _function(self.named("snippet"), [self.owner, packed], snippet, where),
            _function(self.named("stepped"), [self.owner, packed, self.named("each")], stepped, where),
            _function(self.named("unpack"), [packed], unpack, where),
        ]
        calls = [n.func for n in self.nodes if isinstance(n, ast.Call) and self._is_global(n.func)]
        if calls:
            called = ast.Tuple(copy.deepcopy(calls), ast.Load())
            found.append(_function(self.named("callees"), [], [ast.Return(called)], where))
        if names["arguments"]:
            given = ast.Tuple(copy.deepcopy(self._arguments(self._node_of("norm"))), ast.Load())
            read = {n.id for n in ast.walk(given) if isinstance(n, ast.Name)}
            if not read & (self.locals - {self.owner}):
                found.append(_function(self.named("arguments"), [self.owner], [ast.Return(given)], where))
        return found

    def _is_global(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.locals

    def _node_of(self, does: str) -> Any:
        return next(node for step, node in zip(self.region.steps, self.nodes, strict=True) if step.does == does)

    def _target(self) -> tuple[ast.expr, dict[str, Any]]:
        """What ``packed`` is assigned to, and the name that each role has in it."""
        names: dict[str, Any] = {"x": self.named("x"), "arguments": []}
        target: ast.expr = ast.Name(names["x"], ast.Store())
        roles = {"sum": "before", "residual": "behind", "gain": "scale", "shift": "shift"}
        for step in self.region.steps:
            if step.does in roles:
                role = roles[step.does]
                names[role] = self.named(role)
                pair: list[ast.expr] = [target, ast.Name(names[role], ast.Store())]
                target = ast.Tuple(pair if step.operand == 0 else pair[::-1], ast.Store())
            elif step.does == "norm" and not self.region.type:
                names["arguments"] = [self.named(name) for name in _PARAMETERS[self.region.kind][1:]]
                target = ast.Tuple([target, *(ast.Name(n, ast.Store()) for n in names["arguments"])], ast.Store())
        return target, names

    def _statements(self, names: dict[str, Any], each: str = "") -> list[ast.stmt]:
        """The operations of the region one by one, on the names of ``_target``; with ``each``, handed to that."""
        chain, body = names["x"], list[ast.stmt]()
        roles = {"sum": "before", "residual": "behind", "gain": "scale", "shift": "shift"}
        for index, (step, node) in enumerate(zip(self.region.steps, self.nodes, strict=True)):
            new = copy.deepcopy(node)
            other = ast.Name(names[roles[step.does]], ast.Load()) if step.does in roles else None
            _put(self.region.kind, step, new, ast.Name(chain, ast.Load()), other, names["arguments"])
            if isinstance(new, ast.AugAssign):
                body.append(_placed(new, node))
                new = ast.Name(chain, ast.Load())
            if each:
                new = ast.Call(ast.Name(self.named(each), ast.Load()), [ast.Constant(index), new], [])
            chain = self.named(f"value_{index}")
            body.append(_placed(ast.Assign([ast.Name(chain, ast.Store())], new), node))
        result: ast.expr = ast.Name(chain, ast.Load())
        if self.region.shared:
            result = ast.Tuple([ast.Name(self.named("value_0"), ast.Load()), result], ast.Load())
        return [*body, _placed(ast.Return(result), self.nodes[-1])]


def _mark(node: ast.AST) -> int:
    """Which node of the forward it is, or is a copy of; -1 for one that was made here."""
    return int(getattr(node, _MARK, -1))


def _at(tree: ast.FunctionDef, step: Step) -> Any:
    """The node of a step. Raises PlanError where there is none."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)) and _place(node, tree) == step.at:
            return node
    raise PlanError(f"regions: {tree.name} has no operation at {step.at}; plan it anew")


def _place(node: Any, tree: ast.FunctionDef) -> Position:
    return node.lineno - tree.lineno, node.col_offset, node.end_lineno - tree.lineno, node.end_col_offset


def _operands(step: Step, node: Any) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        target: Any = node.target
        return [ast.copy_location(ast.Name(target.id, ast.Load()), node), node.value]
    return [node.func.value, *node.args] if step.is_method else [*node.args]


def _not_one(node: Any) -> ast.expr:
    """``s`` of ``1 + s``."""
    return node.right if isinstance(node.left, ast.Constant) else node.left  # type: ignore[no-any-return]


def _put(kind: str, step: Step, node: Any, chain: ast.expr, other: ast.expr | None, arguments: Sequence[str]) -> None:
    """Give a copy of a step's node, in a region of ``kind``, other operands."""
    old = _operands(step, node)[step.operand]
    if step.does == "activation" and isinstance(node, ast.BinOp):  # x * sigmoid(x)
        _Renamer(old.id, chain).visit(node)  # type: ignore[attr-defined]
        return
    if isinstance(node, ast.BinOp):
        sides = ["left", "right"]
        setattr(node, sides[step.operand], chain)
        beside = sides[1 - step.operand]
        if step.does == "gain":
            inner = getattr(node, beside)
            setattr(inner, "right" if isinstance(inner.left, ast.Constant) else "left", other)
        else:
            setattr(node, beside, other)
    elif isinstance(node, ast.AugAssign):
        node.target, node.value = ast.Name(chain.id, ast.Store()), other  # type: ignore[attr-defined,assignment]
    elif step.does == "norm" and arguments:
        by_name = dict(zip(_PARAMETERS[kind][1:], arguments, strict=True))
        positional = [*by_name][: len(node.args) - 1]
        node.args = [chain, *(ast.Name(by_name[name], ast.Load()) for name in positional)]
        for keyword in node.keywords:
            keyword.value = ast.Name(by_name[str(keyword.arg)], ast.Load())
    else:
        given = _operands(step, node)
        given[step.operand] = chain
        if other is not None:
            given[1 - step.operand] = other
        if step.is_method:
            node.func.value, *node.args = given
        else:
            node.args = given


class _Renamer(ast.NodeTransformer):
    def __init__(self, name: str, new: ast.expr) -> None:
        self.name, self.new = name, new

    def visit_Name(self, node: ast.Name) -> Any:
        return self.new if node.id == self.name else node


def _placed(node: Any, where: ast.AST) -> Any:
    """``node``, its parts that have no place yet at that of ``where``."""
    for part in ast.walk(node):
        if "lineno" in part._attributes and "lineno" not in vars(part):
            ast.copy_location(part, where)
    return node


def _function(name: str, arguments: list[str], body: list[Any], where: ast.AST) -> ast.FunctionDef:
    made: Any = ast.parse(f"def {name}({', '.join(arguments)}): pass").body[0]
    for part in ast.walk(made):  # it stands in no file
        for attribute in part._attributes:
            if hasattr(part, attribute):
                delattr(part, attribute)
    made.body = body
    return _placed(made, where)  # type: ignore[no-any-return]


def _codes(
    forward: types.FunctionType, functions: Sequence[ast.FunctionDef], helpers: Sequence[str]
) -> dict[str, types.CodeType]:
    """The code of each function by its name, compiled as methods of a class of the same name (private names depend on
    that) inside a function whose parameters are the helpers."""
    owner = ["", *forward.__qualname__.split(".")][-2]
    where, body = functions[0], list[ast.stmt](functions)
    if owner.isidentifier():  # else no class stands around it
        made: Any = ast.parse(f"global {owner}\nclass {owner}: pass").body  # global: the forward may name its class
        made[1].body, body = body, made
    outer = _function(f"{_PREFIX}factory", [*helpers], body, where)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = forward.__code__.co_flags & _FUTURES
    code = compile(module, forward.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
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


def _futures() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags


_FUTURES = _futures()
