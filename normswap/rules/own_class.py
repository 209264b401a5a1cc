"""Classes whose code needs to be that of ``type(self)``: no other class can take their place on an instance."""

from __future__ import annotations

import ast
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from normswap.source import source_tree


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
        if "__new__" in vars(one) and any(vars(each).get("__slots__") for each in cls.__mro__):
            return f"{one.__name__} has slots and its own __new__, which copies are made by"
        for name, value in vars(one).items():
            if name != "__init__" and any(_asks_above(function) for function in _functions_in(value)):
                return f"{one.__name__}.{name} asks super() for what stands above the class of self"
    for name in sorted(_reached(cls)):
        if any(map(_stores, _functions_in(inspect.getattr_static(cls, name)))):
            return f"{cls.__name__}.{name}, which forward may call, writes to the class of self"
    return ""


def _reached(cls: Any) -> set[str]:
    """What of a class its forward names, and what that names in turn."""
    found, waiting = {"forward"}, ["forward"]
    while waiting:
        for function in _every_function_in(inspect.getattr_static(cls, waiting.pop(), None)):
            new = {name for name in function.__code__.co_names if _is_own(cls, name)} - found
            found |= new
            waiting += new
    return found


def _is_own(cls: Any, name: str) -> bool:
    return any(
        name in vars(one) for one in cls.__mro__ if one.__module__.partition(".")[0] not in ("torch", "builtins")
    )


def _every_function_in(value: Any) -> Iterator[types.FunctionType]:
    for one in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))):
        if isinstance(one, types.FunctionType):
            yield one


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Those that may be about a class, of what stands in one."""
    for one in _every_function_in(value):
        if isinstance(value, classmethod) or not {"__class__", "type"}.isdisjoint(one.__code__.co_names):
            yield one


def _asks_above(function: types.FunctionType) -> bool:
    """Whether it calls ``super(type(self), self)``."""
    nodes, is_class = _read(function)
    return any(
        isinstance(node, ast.Call) and _is_named(node.func, "super") and bool(node.args) and is_class(node.args[0])
        for node in nodes
    )


def _stores(function: types.FunctionType) -> bool:
    """Whether it writes to ``type(self)``."""
    nodes, is_class = _read(function)
    for node in nodes:
        match node:
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()) if is_class(value):
                return True
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[value, *_]) if is_class(value):
                return True
    return False


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _read(function: types.FunctionType) -> tuple[list[ast.AST], Callable[[ast.expr], bool]]:
    """The nodes of a method, none where it has no source, and what tells the class of self among them."""
    tree = source_tree(function.__code__)
    if tree is None or not function.__code__.co_argcount:
        return [], lambda node: False
    first, nodes = function.__code__.co_varnames[0], [*ast.walk(tree)]
    named = {first} if _is_class_method(tree) else set[str]()

    def is_class(node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in named
            case (
                ast.Attribute(value=ast.Name(id=name), attr="__class__")
                | ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=name)])
            ):
                return name == first
        return False

    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_class(value):
                named.add(name)
    return nodes, is_class


def _is_class_method(tree: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "classmethod" for one in tree.decorator_list)
