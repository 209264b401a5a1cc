"""Classes whose code needs to be that of ``type(self)``: no other class can take their place on an instance."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from normswap.source import source_tree


def why_itself(module: nn.Module) -> str:
    """Why the class of ``module`` cannot give way to a subclass of it, "" where it can."""
    cls: Any = type(module)
    return _why(cls)


@functools.cache
def _why(cls: Any) -> str:
    for one in cls.__mro__:
        if one is object or one.__module__.partition(".")[0] == "torch":
            continue
        if "__new__" in vars(one):
            return f"{one.__name__} has its own __new__, without which no copy is made"
        for name, value in vars(one).items():
            if name != "__init__" and any(map(_needs_it, _functions_in(value))):
                return f"{one.__name__}.{name} writes to the class of self, or asks super() for what stands above that"
    return ""


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Those that may be about a class, of what stands in one."""
    for one in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))):
        names = one.__code__.co_names if isinstance(one, types.FunctionType) else ()
        if isinstance(value, classmethod) or "__class__" in names or "type" in names:
            yield from [one] if names else []


def _needs_it(function: types.FunctionType) -> bool:
    """Whether a function stores in ``type(self)``, or calls ``super(type(self), self)``."""
    tree = source_tree(function.__code__)
    if tree is None or not function.__code__.co_argcount:
        return False
    first = function.__code__.co_varnames[0]

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

    named = {first} if _is_class_method(tree) else set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_class(value):
                named.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()) if is_class(value):
                return True
            case ast.Call(func=ast.Name(id="super" | "setattr" | "delattr"), args=[value, *_]) if is_class(value):
                return True
    return False


def _is_class_method(tree: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "classmethod" for one in tree.decorator_list)
