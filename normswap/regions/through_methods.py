"""Convolutions whose output one method of a module computes and whose BatchNorm another one calls, as DenseNet's layers
have them, perhaps by way of torch.utils.checkpoint."""

from __future__ import annotations

import ast
import copy
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.utils.checkpoint import checkpoint

from normswap.attributes import is_hidden, own_getattr
from normswap.regions.flow import SEES_LOCALS
from normswap.regions.foldings import is_convolution
from normswap.source import definition, global_named

_NOT_FOLLOWED = (
    *(ast.With, ast.Try, ast.Match, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.ClassDef, ast.Delete),
    *(ast.AsyncFunctionDef, ast.Yield, ast.YieldFrom, ast.Await),
)


def through_methods(
    owner: nn.Module, functions: Mapping[str, types.FunctionType], norms: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """(convolution, norm) by name of each of ``norms``, children of ``owner`` in eval, that normalises what one of its
    convolutions gives and nothing else does, by the code of ``functions``, its forward and all its methods that run
    then, whichever way each of them goes."""
    if owner.__dict__.keys() & functions.keys() or own_getattr(owner) is not None:
        return
    found = {name: definition(function, decorated=True) for name, function in functions.items()}
    trees = {name: tree for name, tree in found.items() if isinstance(tree, ast.FunctionDef) and not _is_beyond(tree)}
    named = [_attributes_in(tree) for tree in trees.values()]
    if trees.keys() != found.keys() or None in named:
        return
    mentions = sum(filter(None, named), Counter[str]())
    for norm in norms:
        if mentions[norm] != 1 or is_hidden(owner, norm):
            continue
        within, call = next(((name, one) for name, tree in trees.items() for one in _calls(norm, tree)), ("", None))
        sources = _Sources(owner, functions, trees)
        if call is not None and sources.follow(call.args[0], within) and sources.are_alone(mentions):
            yield sources.convolution, norm


@dataclass
class _Sources:
    """What may flow into one argument: the calls of one convolution, and of methods that hand on what those give."""

    owner: nn.Module
    functions: Mapping[str, types.FunctionType]
    trees: Mapping[str, ast.FunctionDef]
    convolution: str = ""
    calls: dict[int, str] = field(default_factory=dict)

    def follow(self, node: ast.expr | None, within: str) -> bool:
        """Whether nothing but what the convolution gives flows into ``node`` of the function called ``within``."""
        tree = self.trees[within]
        if isinstance(node, ast.Name):
            values = _values_of(node.id, tree)
            return bool(values) and all(self.follow(value, within) for value in values)
        if id(node) in self.calls:
            return True
        if not isinstance(node, ast.Call):
            return False
        if (child := _child_called(node, tree)) is None:
            return self._checkpointed(node, within)
        self.calls[id(node)] = child
        if child in self.trees:
            return self._returned(self.trees[child], child)
        if is_hidden(self.owner, child) or not is_convolution(self.owner._modules.get(child)):
            return False
        self.convolution = self.convolution or child
        return child == self.convolution and len(node.args) == 1 and not node.keywords

    def _returned(self, function: ast.FunctionDef, within: str) -> bool:
        """Whether all that ``function``, which stands in the one called ``within``, returns comes from there."""
        values = [node.value for node in _own(function) if isinstance(node, ast.Return)]
        return all(self.follow(value, within) for value in values)

    def _checkpointed(self, node: ast.Call, within: str) -> bool:
        """The same of a function inside, called by way of torch.utils.checkpoint."""
        tree, first = self.trees[within], node.args[0] if node.args else None
        if not isinstance(first, ast.Name) or not _checkpoints(global_named(node.func, self.functions[within])):
            return False
        inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not tree and n.name == first.id]
        alone = len(inner) == 1 and not inner[0].decorator_list and _uses(first.id, tree) == [first]
        return alone and self._returned(inner[0], within)

    def are_alone(self, mentions: Mapping[str, int]) -> bool:
        """Whether nobody else calls the convolution or one of those methods."""
        called = Counter(self.calls.values())
        return bool(self.convolution) and all(mentions[name] == count for name, count in called.items())


def _checkpoints(function: object) -> bool:
    """Whether it is torch.utils.checkpoint's, or returns that of its first argument."""
    if function is checkpoint:
        return True
    tree = definition(function) if isinstance(function, types.FunctionType) else None
    if not isinstance(tree, ast.FunctionDef) or _is_beyond(tree):
        return False
    first = _parameters(tree)[0]
    match [node.value for node in _own(tree) if isinstance(node, ast.Return)]:
        case [ast.Call(func=called, args=[ast.Name(id=name), *_])] if name == first and len(_uses(first, tree)) == 1:
            return _checkpoints(global_named(called, function))  # type: ignore[arg-type]
    return False


def _values_of(name: str, tree: ast.FunctionDef) -> list[ast.expr]:
    """All that a local variable is ever given; none where that is not known, or where it is read more than once."""
    taken = any(isinstance(node, ast.arg) and node.arg == name for node in ast.walk(tree))
    given = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and [*map(_named, n.targets)] == [name]]
    return given if not taken and len(_uses(name, tree)) == 1 + len(given) else []


def _named(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _uses(name: str, tree: ast.FunctionDef) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]


def _calls(child: str, tree: ast.FunctionDef) -> list[ast.Call]:
    """The calls self.child(value)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _child_called(node, tree) == child]
    return [call for call in calls if len(call.args) == 1 and not call.keywords]


def _child_called(call: ast.Call, tree: ast.FunctionDef) -> str | None:
    """``name`` of a call self.name(...)."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr=child) if name == _parameters(tree)[0]:
            return child
    return None


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function but for those of functions inside it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _parameters(tree: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]


def _is_beyond(tree: ast.FunctionDef) -> bool:
    """Whether a function does what is not followed, or another name than its first parameter's may be the module's."""
    nodes = [*ast.walk(tree)]
    arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
    own = _parameters(tree)
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    clear = bool(own) and arguments.count(own[0]) == 1 and named.isdisjoint(SEES_LOCALS)
    return not clear or any(isinstance(node, _NOT_FOLLOWED) for node in nodes)


_BY_ANY_NAME = frozenset(
    {"getattr", "_modules", "__dict__", "children", "modules", "named_children", "named_modules", "get_submodule"}
)


def _attributes_in(tree: ast.FunctionDef) -> Counter[str] | None:
    """How often a method names each attribute, of whatever; None where it may call a child that it does not name: by a
    name that it computes, or by handing self on."""
    spelled = _Spelled().visit(copy.deepcopy(tree))
    attributes = [node for node in ast.walk(spelled) if isinstance(node, ast.Attribute)]
    names = [node for node in ast.walk(spelled) if isinstance(node, ast.Name)]
    owner = next(argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args))
    read = {id(node.value) for node in attributes}
    handed_on = any(name.id == owner and id(name) not in read for name in names)
    if handed_on or not _BY_ANY_NAME.isdisjoint([*(node.attr for node in attributes), *(node.id for node in names)]):
        return None
    return Counter(node.attr for node in attributes)


class _Spelled(ast.NodeTransformer):
    """``getattr(owner, "name", None)`` as ``owner.name``; without questions whether ``owner.name`` is None."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(
                left=ast.Attribute(value=ast.Name()),
                ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ):
                return ast.Constant(True)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name() as owner, ast.Constant(value=str() as name), *default],
                keywords=[],
            ) if all(isinstance(one, ast.Constant) for one in default):
                return ast.Attribute(owner, name, ast.Load())
        return self.generic_visit(node)
