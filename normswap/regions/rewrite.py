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
from dataclasses import dataclass, replace
from typing import Any

from torch import Size, Tensor

from normswap.attributes import Rejection
from normswap.ops.dispatch import PLAIN
from normswap.plans import PlanError
from normswap.regions.inline import inlined
from normswap.regions.spec import ROLES, Region, Step, others_of, parameters_of
from normswap.regions.syntax import (
    MARK,
    PREFIX,
    codes_of,
    fill,
    made_function,
    mark_of,
    node_at,
    place_of,
    placed,
    slots,
)
from normswap.source import content_of, definition, is_global, undecorated

Helper = Callable[[Any, Any], Any]


def of_summands(packed: Any) -> tuple[Tensor, Tensor] | None:
    """``packed`` is ((one, other), sizes): both in the shape in which their sum is looked at. None where that is not to
    be had for nothing, or where only the sum itself has that shape: one is broadcast to the other, say."""
    (one, other), sizes = packed
    if type(one) not in PLAIN or type(other) not in PLAIN or one.is_nested or other.is_nested:
        return None
    if one.shape != other.shape:
        return None
    if not one.is_contiguous() or not other.is_contiguous():
        return None
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, Size)):
        (sizes,) = sizes
    for size in sizes:
        if type(size) is not int:  # a dtype, say
            return None
    return one.view(*sizes), other.view(*sizes)


@dataclass(frozen=True)
class Compiled:
    """What is compiled of one region.

    ``snippet(self, packed)``: its own statements, which give its result or, where the sum is shared, (sum, result).
    The others are those of the region without the ``views`` of the sum, of what is then handed on, ``inner(packed)``:
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
    views: bool = False

    def inner(self, packed: Any) -> Any:
        """What the helper is given, without a view; None where the statements alone will do."""
        return of_summands(packed) if self.views else packed


def compile_regions(
    forward: types.FunctionType, regions: Sequence[Region]
) -> tuple[list[Compiled], Callable[[Sequence[Helper]], types.FunctionType]]:
    """The regions compiled, and what makes the forward from a helper for each.

    Raises PlanError where ``forward`` has no source now, or holds no such nodes.
    """
    whole, forward = forward, undecorated(forward)
    found = definition(forward, decorated=forward is not whole)
    if isinstance(found, Rejection):
        raise PlanError(f"regions: {found.detail}; plan it anew")
    places = {step.at for region in regions for step in region.steps}
    places |= {node.at for region in regions for node in region.nodes}
    tree = copy.deepcopy(inlined(found, forward.__globals__, lambda call: place_of(call, found) in places)[0])
    for key, node in enumerate(ast.walk(tree)):  # so that copies of them can be told
        setattr(node, MARK, key)
    made = [_Region(tree, forward, index, region) for index, region in enumerate(regions)]
    edits: dict[int, ast.AST] = {}
    for one in made:
        edits |= one.edits()
    rewritten = _Rewriter(edits).visit(copy.deepcopy(tree))
    rewritten.decorator_list = []
    functions = [rewritten, *(f for one in made for f in one.functions())]
    code = codes_of(forward, functions, [one.helper for one in made])
    compiled = []
    for one in made:
        names = [name for name in ("snippet", "stepped", "unpack", "arguments", "callees") if one.named(name) in code]
        found_code = {name: types.FunctionType(code[one.named(name)], forward.__globals__) for name in names}
        compiled.append(Compiled(one.inner, **found_code, views=one.inner is not one.region))

    def make(helpers: Sequence[Helper]) -> types.FunctionType:
        cells = {one.helper: types.CellType(helper) for one, helper in zip(made, helpers, strict=True)}
        body = code[forward.__code__.co_name]
        closure = tuple(cells[name] for name in body.co_freevars)
        new = types.FunctionType(body, forward.__globals__, forward.__name__, forward.__defaults__, closure)
        new.__kwdefaults__, new.__qualname__ = forward.__kwdefaults__, forward.__qualname__
        new.__annotations__, new.__doc__ = forward.__annotations__, forward.__doc__
        new.__module__ = forward.__module__
        return _decorated(whole, forward, new)

    return compiled, make


def _decorated(whole: types.FunctionType, inner: types.FunctionType, new: types.FunctionType) -> types.FunctionType:
    """``whole``, decorators around ``inner``, around ``new`` instead."""
    if whole is inner:
        return new
    below = whole.__wrapped__  # type: ignore[attr-defined]
    around = types.CellType(_decorated(below, inner, new))
    cells = tuple(around if content_of(cell) is below else cell for cell in whole.__closure__ or ())
    made = types.FunctionType(whole.__code__, whole.__globals__, whole.__name__, whole.__defaults__, cells)
    made.__kwdefaults__ = whole.__kwdefaults__
    made.__dict__.update(whole.__dict__)
    return made


class _Rewriter(ast.NodeTransformer):
    """Puts the edits in place: what stands for a marked node may hold nodes that are edited themselves."""

    def __init__(self, edits: dict[int, ast.AST]) -> None:
        self.edits = edits

    def visit(self, node: ast.AST) -> Any:
        edit = self.edits.get(mark_of(node))
        return self.generic_visit(node) if edit is None else self.visit(copy.deepcopy(edit))


@dataclass(frozen=True)
class _Operation:
    """One operation of a region: its node in the forward, and what each operand of that is, as in ``Node``. ``step``:
    the step that it is, None for what stands within one."""

    node: Any
    operands: Sequence[int | str]
    is_method: bool = False
    step: Step | None = None

    def does(self, what: str) -> bool:
        return self.step is not None and self.step.does == what

    def given(self) -> list[tuple[ast.expr, int | str]]:
        """The source of each operand that does not stay in the code, and what it is."""
        pairs = zip(slots(self.node, self.is_method), self.operands, strict=True)
        return [(source, operand) for source, operand in pairs if operand != ""]


def _operations(region: Region, tree: ast.FunctionDef) -> list[_Operation]:
    """Those of the steps, with "x" for what the first is of; before them those within: of a norm that is written out,
    and the sum of ``x * (1 + s)``."""
    found = list[_Operation]()
    chain: int | str = "x"
    for step in region.steps:
        node, first = node_at(tree, step), len(found)
        operands: list[int | str]
        if step.does == "norm" and region.nodes:
            for part in region.nodes:
                operands = [chain if o == "x" else first + o if isinstance(o, int) else o for o in part.operands]
                found.append(_Operation(node_at(tree, part), operands, part.is_method))
            found[-1] = replace(found[-1], step=step)
        else:
            sources: list[Any] = slots(node, step.is_method)
            operands = [""] * len(sources)
            operands[step.operand] = chain
            if step.does in ROLES:
                operands[1 - step.operand] = ROLES[step.does]
            if step.does == "gain":
                one_plus, operands[1 - step.operand] = sources[1 - step.operand], first
                is_left = isinstance(one_plus.right, ast.Constant)
                found.append(_Operation(one_plus, [ROLES["gain"], ""] if is_left else ["", ROLES["gain"]]))
            found.append(_Operation(node, operands, step.is_method, step))
        chain = len(found) - 1
    return found


class _Region:
    """One region in the tree of its forward."""

    def __init__(self, tree: ast.FunctionDef, forward: types.FunctionType, index: int, region: Region) -> None:
        self.tree, self.region, self.index = tree, region, index
        inner = tuple(step for step in region.steps if step.does != "view")
        self.owner = forward.__code__.co_varnames[0]
        self.locals = {*forward.__code__.co_varnames, *forward.__code__.co_cellvars}
        self.helper, self.result = self.named("region"), self.named("result")
        self.operations = _operations(region, tree)
        self.inner = replace(region, steps=inner) if len(inner) < len(region.steps) else region
        self.summed = 0 if self.inner is region else 1
        """Which operation gives the sum, as it is looked at."""

    def named(self, what: str) -> str:
        return f"{PREFIX}{what}_{self.index}"

    def loaded(self, what: str) -> ast.expr:
        return ast.Name(self.named(what), ast.Load())

    # --- the forward ----------------------------------------------------------------------------------------------

    def edits(self) -> dict[int, ast.AST]:
        """What stands for each node, by its mark; the nodes within are the originals."""
        found: dict[int, ast.AST] = {}
        for index, operation in enumerate(self.operations):
            node, handed = operation.node, self._handed_on(operation)
            if self.region.shared and index == self.summed:
                statement = next(s for s in ast.walk(self.tree) if isinstance(s, ast.Assign) and s.value is node)
                (name,) = statement.targets
                both = ast.Tuple([name, ast.Name(self.result, ast.Store())], ast.Store())
                found[mark_of(statement)] = placed(ast.Assign([both], self._call(handed)), statement)
                continue
            if operation is self.operations[-1]:
                handed = ast.Name(self.result, ast.Load()) if self.region.shared else self._call(handed)
            new: ast.AST = handed
            if isinstance(node, ast.AugAssign):
                new = ast.Assign([node.target], handed)
            found[mark_of(node)] = placed(new, node)
        return found

    def _call(self, packed: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(self.helper, ast.Load()), [ast.Name(self.owner, ast.Load()), packed], [])

    def _handed_on(self, operation: _Operation) -> ast.expr:
        """The operands of an operation, which nobody computes with yet."""
        if operation.does("view"):
            viewed, *sizes = slots(operation.node, is_method=True)
            return ast.Tuple([viewed, ast.Tuple(sizes, ast.Load())], ast.Load())
        given = [source for source, _ in operation.given()]
        return given[0] if len(given) == 1 else ast.Tuple(given, ast.Load())

    # --- the snippet and what unpacks -----------------------------------------------------------------------------

    def functions(self) -> list[ast.FunctionDef]:
        packed, where = self.named("packed"), next(one.node for one in self.operations if one.step)
        unpacked = placed(ast.Assign([self._unpacked(-1)], ast.Name(packed, ast.Load())), where)
        named = {operand for one in self.operations for operand in one.operands}
        roles = ("x", "before", "behind", "scale", "shift")
        loads = [self.loaded(role) if role in named else ast.Constant(None) for role in roles]
        given = [*self._arguments(self.loaded), *map(self.loaded, others_of(self.region))]
        loads.append(ast.Tuple(given, ast.Load()))
        stepped = [unpacked, *self._statements("each")]
        snippet = [unpacked if self.inner is self.region else self._with_sizes(unpacked), *self._statements()]
        unpack = [unpacked, ast.Return(ast.Tuple(loads, ast.Load()))]
        found = [
            made_function(self.named("snippet"), [self.owner, packed], snippet, where),
            made_function(self.named("stepped"), [self.owner, packed, self.named("each")], stepped, where),
            made_function(self.named("unpack"), [packed], unpack, where),
        ]
        nodes = [one.node for one in self.operations]
        calls = [n.func for n in nodes if isinstance(n, ast.Call) and is_global(n.func, self.locals)]
        if calls:
            called = ast.Tuple(copy.deepcopy(calls), ast.Load())
            found.append(made_function(self.named("callees"), [], [ast.Return(called)], where))
        if not self.region.type:
            written = ast.Tuple(self._arguments(self._written), ast.Load())
            read = {n.id for n in ast.walk(written) if isinstance(n, ast.Name)}
            if not read & (self.locals - {self.owner}):
                found.append(made_function(self.named("arguments"), [self.owner], [ast.Return(written)], where))
        return found

    def _with_sizes(self, unpacked: ast.Assign) -> Any:
        """``unpacked`` of a packed sum, where the sizes of its view come with it."""
        target: ast.expr = ast.Tuple([unpacked.targets[0], ast.Name(self.named("sizes"), ast.Store())], ast.Store())
        return placed(ast.Assign([target], unpacked.value), unpacked)

    def _arguments(self, named: Callable[[str], ast.expr]) -> list[ast.expr]:
        """What the norm takes behind its input, in order: ``named`` gives what is no constant."""
        given = {operand for node in self.region.nodes for operand in node.operands}
        constants = self.region.constants
        return [
            named(name) if name in given else ast.Constant(constants.get(name)) for name in parameters_of(self.region)
        ]

    def _written(self, name: str) -> ast.expr:
        """The source of a value by its name."""
        every = (pair for one in self.operations for pair in one.given())
        return copy.deepcopy(next(source for source, operand in every if operand == name))

    def _unpacked(self, index: int) -> ast.expr:
        """What the operands of an operation are assigned to."""
        targets = [
            self._unpacked(operand) if isinstance(operand, int) else ast.Name(self.named(operand), ast.Store())
            for _, operand in self.operations[index].given()
        ]
        return targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())

    def _statements(self, each: str = "") -> list[ast.stmt]:
        """The operations one by one; with ``each``, what every step gives is handed to that, and a view is none."""
        body, results, count = list[ast.stmt](), list[str](), 0
        for index, operation in enumerate(self.operations):
            node, is_view = operation.node, operation.does("view")
            if each and is_view:
                results.append(results[-1])
                continue
            new: Any = copy.deepcopy(node)
            operands: list[ast.expr] = [
                source
                if operand == ""
                else ast.Name(results[operand] if isinstance(operand, int) else self.named(operand), ast.Load())
                for source, operand in zip(slots(new, operation.is_method), operation.operands, strict=True)
            ]
            if is_view:
                operands = [operands[0], ast.Starred(self.loaded("sizes"), ast.Load())]
            if operation.does("activation") and isinstance(new, ast.BinOp):  # x * sigmoid(x)
                ((written, _),) = operation.given()
                for part in ast.walk(new):
                    if isinstance(part, ast.Name) and part.id == ast.unparse(written):
                        part.id = results[-1]
            fill(new, operation.is_method, operands)
            if isinstance(new, ast.AugAssign):
                body.append(placed(new, node))
                new = operands[0]
            if each and operation.step:
                new = ast.Call(self.loaded(each), [ast.Constant(count), new], [])
                count += 1
            results.append(self.named(f"value_{index}"))
            body.append(placed(ast.Assign([ast.Name(results[-1], ast.Store())], new), node))
        result: ast.expr = ast.Name(results[-1], ast.Load())
        if self.region.shared:
            result = ast.Tuple([ast.Name(results[self.summed], ast.Load()), result], ast.Load())
        return [*body, placed(ast.Return(result), self.operations[-1].node)]
