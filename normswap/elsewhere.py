"""What the code of a model takes of its modules otherwise than as ``self.name``: by an index, in a loop over a
container, or through another module. Whoever does so may call a part of what others call whole."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator

from torch import nn

from normswap.attributes import modules_in
from normswap.installed import class_before
from normswap.rules.expression_site import class_forward
from normswap.rules.region import methods_of
from normswap.source import source_tree
from normswap.untouched import classes

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_THROUGH = frozenset({"children", "named_children", "values", "items", "_modules"})
_FAR = frozenset({"modules", "named_modules", "get_submodule"})
_HANDS_ON = frozenset(
    {"enumerate", "zip", "reversed", "list", "tuple", "iter", "sorted", "next", "dict", "map", "filter"}
)
_ASKS = frozenset({"isinstance", "len", "type", "hasattr", "callable", "bool", "id", "str", "repr", "print", "super"})
"""What asks of a module no more than what it is."""


def taken_apart(model: nn.Module) -> set[int]:
    """The ids of the modules in ``model`` that code takes so, in the forwards of its modules and their methods."""
    found: set[int] = set()
    with classes([(module, class_before(module)) for _, module in modules_in(model)]):  # as they were written
        for _, module in modules_in(model):
            forward = class_forward(module)
            if forward is None or str(forward.__module__).startswith("torch.nn.modules"):
                continue
            for function in methods_of(module, forward).values():
                tree = source_tree(function.__code__)
                if tree is not None and function.__code__.co_argcount:
                    found |= {id(one) for one in _Reader(module, function, tree).taken()}
    return found


class _Reader:
    """Reads one function of ``module``; the order of its statements is ignored."""

    def __init__(self, module: nn.Module, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        self.module, self.own = module, function.__code__.co_varnames[0]
        self.nodes = [*ast.walk(tree)]
        self.local: dict[str, dict[int, nn.Module]] = {}
        self.several: set[str] = set()  # of those, the names of lists

    def taken(self) -> list[nn.Module]:
        """All of them."""
        before = -1
        while before != (before := sum(map(len, self.local.values()))):
            for node in self.nodes:
                self._assign(node)
        return [one for node in self.nodes for one in self._taken(node)]

    def _assign(self, node: ast.AST) -> None:
        match node:
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._name(target, self._within(value))
            case ast.Assign(targets=[*targets], value=value):
                for target in targets:
                    self._name(target, self._values(value))
                    if isinstance(target, ast.Name) and self._are_several(value):
                        self.several.add(target.id)
            case ast.NamedExpr(target=target, value=value):
                self._name(target, self._values(value))

    def _name(self, target: ast.expr, values: Iterable[nn.Module]) -> None:
        names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
        for name in names:
            self.local.setdefault(name, {}).update({id(one): one for one in values})

    def _taken(self, node: ast.AST) -> Iterator[nn.Module]:
        """Of whatever is called, handed on, kept or asked for more than a child, what is no ``self.name``."""
        match node:
            case ast.Call(func=function, args=given, keywords=named):
                yield from self._apart(function)
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if name in _HANDS_ON or name in _ASKS or name == "getattr":
                    return
                for one in (*given, *(keyword.value for keyword in named)):
                    yield from self._apart(one)
                    if "checkpoint" not in name:  # which calls it as a whole
                        yield from (child for held in self._values(one) for child in _children(held))
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                yield from (one for one in self._apart(value) if _has(one, name))
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                yield from self._apart(value)
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()], value=value):
                yield from self._apart(value)

    def _apart(self, node: ast.expr) -> list[nn.Module]:
        """The modules that an expression may be, unless it is ``self`` or ``self.name``."""
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)) if name == self.own:
                return []
        return self._values(node)

    def _values(self, node: ast.expr) -> list[nn.Module]:
        """The modules that an expression may be, or hold."""
        match node:
            case ast.Name(id=name):
                return [self.module] if name == self.own else [*self.local.get(name, {}).values()]
            case ast.Attribute(value=value, attr=name):
                bases = self._values(value)
                if name in _THROUGH and self._are_several(value):  # of ``_modules``
                    return bases
                if name in _THROUGH or name in _FAR:
                    return [one for base in bases for one in (_children(base) if name in _THROUGH else base.modules())]
                return [child for base in bases if (child := base._modules.get(name)) is not None]
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as name), *_]):
                return self._values(ast.Attribute(value, name, ast.Load()))
            case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                return [child for base in self._values(value) for child in _children(base)]
            case ast.Call(func=ast.Name(id=name), args=given) if name in _HANDS_ON:
                return [one for value in given for one in self._within(value)]
            case ast.Call(func=ast.Attribute(attr=name) as method) if name in _THROUGH or name in _FAR:
                return self._values(method)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as index)):
                return [one for held in self._values(value) for one in _at(held, index)]
            case ast.Subscript(value=value):
                return self._within(value)
            case ast.IfExp(body=one, orelse=other):
                return self._values(one) + self._values(other)
            case ast.BoolOp(values=several) | ast.List(elts=several) | ast.Tuple(elts=several):
                return [one for value in several for one in self._values(value)]
            case ast.ListComp(elt=value) | ast.GeneratorExp(elt=value) | ast.Starred(value=value):
                return self._values(value)
        return []

    def _within(self, node: ast.expr) -> list[nn.Module]:
        """Those that come of going through it: the children of a container, what a list may hold."""
        held = self._values(node)
        if self._are_several(node):
            return held
        return [one for value in held for one in (_children(value) if isinstance(value, _CONTAINERS) else [value])]

    def _are_several(self, node: ast.expr) -> bool:
        """Whether what ``_values`` gives are the elements of an expression."""
        match node:
            case ast.Name(id=name):
                return name in self.several
            case ast.Call(func=ast.Name(id=name)):
                return name in _HANDS_ON
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Attribute(attr=name):
                return name in _THROUGH | _FAR
        return isinstance(node, ast.List | ast.Tuple | ast.ListComp | ast.GeneratorExp)


def _has(module: nn.Module, name: str) -> bool:
    """Whether that is an attribute of a module, and no child."""
    there = name in module._parameters or name in module._buffers or name in module.__dict__
    return name not in _THROUGH | _FAR and (there or hasattr(type(module), name))


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in module._modules.values() if child is not None]


def _at(module: nn.Module, index: int) -> list[nn.Module]:
    """What stands there in a container; what is no container is one of a list: itself."""
    if not isinstance(module, _CONTAINERS):
        return [module]
    children = _children(module)
    return [children[index]] if -len(children) <= index < len(children) else children
