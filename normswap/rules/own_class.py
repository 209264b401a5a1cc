"""Classes whose code needs to be that of ``type(self)``: no other class can take their place on an instance."""

from __future__ import annotations

import ast
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from normswap.attributes import functions_in
from normswap.source import global_named, source_tree


def why_itself(module: nn.Module) -> str:
    """Why the class of ``module`` cannot give way to a subclass of it, "" where it can."""
    cls: Any = type(module)
    if cls not in _KNOWN:
        _KNOWN[cls] = _why(cls)
    return _KNOWN[cls]


_KNOWN: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _why(cls: Any) -> str:
    for one in cls.__mro__:
        if one is object or one.__module__.partition(".")[0] == "torch":
            continue
        if "__class__" in vars(one):
            return f"{one.__name__} says itself what its __class__ is"
        if "__new__" in vars(one) and any(vars(each).get("__slots__") for each in cls.__mro__):
            return f"{one.__name__} has slots and its own __new__, which copies are made by"
        for name, value in vars(one).items():
            if name != "__init__" and any(method.asks_above() for method in _methods_in(value)):
                return f"{one.__name__}.{name} asks super() for what stands above the class of self"
    for name in sorted(_reached(cls)):
        if any(method.stores() for method in _methods_in(inspect.getattr_static(cls, name))):
            return f"{cls.__name__}.{name}, which forward may call, writes to the class of self"
    return ""


def _reached(cls: Any) -> set[str]:
    """What of a class its forward names, and what that names in turn."""
    found = {name for name in ("forward", "__call__") if _is_own(cls, name)}
    waiting = [*found]
    while waiting:
        for function in functions_in(inspect.getattr_static(cls, waiting.pop())):
            new = {name for name in _words(inspect.unwrap(function)) if _is_own(cls, name)} - found
            found |= new
            waiting += new
    return found


def _words(function: Any) -> Iterator[str]:
    """Every name in the code of a function, what stands in a text for ``getattr`` too."""
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, types.CodeType):
            yield from code.co_names
            yield from (one for one in code.co_consts if isinstance(one, str))
            codes.extend(code.co_consts)


def _is_own(cls: Any, name: str) -> bool:
    return any(
        name in vars(one) for one in cls.__mro__ if one.__module__.partition(".")[0] not in ("torch", "builtins")
    )


def _methods_in(value: Any) -> Iterator[_Method]:
    """What stands in a class, where it has a first argument and may be about a class."""
    for function in functions_in(value):
        inner = inspect.unwrap(function)
        if isinstance(inner, types.FunctionType) and inner.__code__.co_argcount and not isinstance(value, staticmethod):
            yield _Method(inner, inner.__code__.co_varnames[0], isinstance(value, classmethod))


_MAY_HAVE = frozenset({"isinstance", "issubclass", "getattr", "hasattr", "super", "str", "repr", "print", "id", "hash"})
"""The functions that do no more than look at a class."""


class _Method:
    """A function in which the name ``own`` is self or, where ``is_class``, its class."""

    def __init__(self, function: types.FunctionType, own: str, is_class: bool, depth: int = 0) -> None:
        self.function, self.own, self.depth = function, own, depth
        tree = (
            None
            if {"__class__", "type"}.isdisjoint(_words(function)) and not is_class
            else source_tree(function.__code__)
        )
        self.classes = {own} if is_class else set[str]()
        self.nodes = [] if tree is None else [*ast.walk(tree)]
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[target], value=value):
                    self._name(target, value)
                case (
                    ast.NamedExpr(target=target, value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    self._name(target, value)

    def asks_above(self) -> bool:
        """Whether it calls ``super(type(self), self)``."""
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
            and bool(node.args)
            and self._is_class(node.args[0])
            for node in self.nodes
        )

    def stores(self) -> bool:
        """Whether it writes to ``type(self)``, or hands that to code that may."""
        for node in self.nodes:
            match node:
                case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()) if self._is_class(value):
                    return True
                case ast.Call(func=function, args=given) if any(map(self._is_class, given)):
                    if not (isinstance(function, ast.Name) and function.id in _MAY_HAVE):
                        return True
        return any(helper.stores() for helper in self._helpers())

    def _helpers(self) -> Iterator[_Method]:
        """Functions that it gives self."""
        tree = source_tree(self.function.__code__) if self.depth < _DEEPEST else None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call):
                continue
            for place, given in enumerate(node.args):
                function = global_named(node.func, self.function) if self._is_self(given) else None
                if not isinstance(function, types.FunctionType) or str(function.__module__).startswith("torch."):
                    continue
                if place < function.__code__.co_argcount:
                    name = function.__code__.co_varnames[place]
                    yield _Method(function, name, is_class=False, depth=self.depth + 1)

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.own and self.own not in self.classes

    def _is_class(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.classes
            case ast.NamedExpr(value=value):
                return self._is_class(value)
            case ast.Attribute(value=value, attr="__class__") | ast.Call(func=ast.Name(id="type"), args=[value]):
                return self._is_self(value)
        return False

    def _name(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _ if self._is_class(value):
                self.classes.add(name)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for one, given in zip(targets, values, strict=True):
                    self._name(one, given)


_DEEPEST = 3
"""Of functions that are given self by functions that are."""
