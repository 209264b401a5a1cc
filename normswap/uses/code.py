"""The functions that may run when a model is called, and what they do with its modules."""

from __future__ import annotations

import ast
import collections
import functools
import re
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap.attributes import functions_in, modules_in
from normswap.held import held_by
from normswap.installed import class_before
from normswap.rules.expression_site import class_forward, names_in
from normswap.rules.region import methods_of
from normswap.source import content_of, is_what_runs, source_tree
from normswap.untouched import classes
from normswap.uses.reader import Reader
from normswap.uses.syntax import as_the_first, reads
from normswap.uses.values import DEEPEST, Many, Mapped, Value, is_torchs, key_of, modules_of, one_of


@dataclass
class Uses:
    """Of modules by their ids: ``apart``: those that are called besides where their parents do it, or given to code
    that may do anything; ``read``: of which their parents read weights; ``calls``: how often forwards, and the methods
    that they call, call a child; ``asked``: by what types code asks what one is, None for any other question."""

    apart: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    calls: Counter[int] = field(default_factory=Counter)
    asked: dict[int, set[Any]] = field(default_factory=dict)

    def would_tell(self, module: nn.Module, made: type[nn.Module]) -> bool:
        """Whether code would see that a ``made`` stands in the place of ``module``."""
        return any(
            cls is None or isinstance(module, cls) != issubclass(made, cls) for cls in self.asked.get(id(module), ())
        )


def uses_in(model: nn.Module) -> Uses:
    """Those of the modules of ``model`` in the forwards of all, in what these call and in hooks."""
    with classes([(module, class_before(module)) for _, module in modules_in(model)]):  # as they were written
        return Code(model).read()


_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, type, types.ModuleType)
_SEVERAL = (list, tuple, set, frozenset, collections.deque)
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class Code:
    """The functions that may run when a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, {id(module): module for _, module in modules_in(model)}
        self.uses = Uses()
        self.waiting: list[tuple[nn.Module | None, types.FunctionType, dict[str, list[Value]]]] = []
        self.seen: set[Any] = set()
        self.kept: dict[tuple[int, int, bool], tuple[Any, list[Value]]] = {}

    def read(self) -> Uses:
        """All of them."""
        for module in self.modules.values():
            self.reach(module, "forward")
            self.reach(module, "__call__")
            self.reach(module, "_call_impl")
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._hooked(module, hook)
        while self.waiting:
            self._read(*self.waiting.pop())
        return self.uses

    def reach(self, module: nn.Module, name: str, above: bool = False) -> None:
        """What is run by the name on a module; ``above``: or what that hides."""
        self.values(module.__dict__.get(name))
        for cls in type(module).__mro__:
            if is_torchs(cls.__module__) or name not in vars(cls):
                continue
            value = vars(cls)[name]
            if isinstance(value, staticmethod | classmethod):  # which are not given the module
                self.values(value.__func__)
            else:
                functions = [*functions_in(value)]
                for function in functions:
                    self.follow(module, function)
                if not functions and hasattr(type(value), "__get__"):
                    self.hand_on(module)
            if not above:
                return

    def named_like(self, module: nn.Module, name: ast.expr) -> list[Value]:
        """All that a name which is computed may give; what it may run is reached."""
        parts, found = name.values if isinstance(name, ast.JoinedStr) else [name], list[Value]()
        like = "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)
        names = {*module._modules, *module.__dict__, *(key for cls in type(module).__mro__ for key in vars(cls))}
        for one in filter(re.compile(f"(?!__.*__$){like}").fullmatch, names - _OF_EVERY_MODULE):
            self.reach(module, one)
            found += self.values(module._modules.get(one, module.__dict__.get(one)))
        return found

    def _hooked(self, module: nn.Module, hook: Any) -> None:
        """A hook is given the module first."""
        if isinstance(hook, types.FunctionType):
            name, given = as_the_first(hook.__code__, one_of([module], whole=True))
            self.follow(None, hook, name, given if reads(hook.__code__, name) else None)
        else:
            self.hand_on(module, *self.values(hook))

    def values(self, held: Any, depth: int = 0, inside: bool = False) -> list[Value]:
        """The modules in what somebody keeps, which may be methods of modules too: those are reached. ``inside``: of an
        object."""
        if type(held) in weakref.ProxyTypes:
            held = _behind(held)
        if isinstance(held, _PLAIN):
            return []
        if id(held) in self.modules:
            return [one_of([held], whole=True)]
        key = id(held), depth, inside
        if key not in self.kept:
            self.kept[key] = held, []  # it may hold itself
            self.kept[key] = held, self._values(held, depth, inside)
        return self.kept[key][1]

    def _values(self, held: Any, depth: int, inside: bool) -> list[Value]:
        if depth == DEEPEST:  # it is not looked into
            self.hand_on(None if inside else self.model)
            return []
        match held:
            case types.MethodType(__self__=nn.Module() as module, __func__=function):
                if getattr(function, "__name__", "") in ("forward", "__call__", "_call_impl", "_wrapped_call_impl"):
                    return self.values(module)
                if isinstance(function, types.FunctionType) and not is_torchs(str(function.__module__)):
                    self.follow(module, function)
                    return []
                parts: list[Any] = [module]
            case dict() | list() | tuple() | set() | frozenset() | collections.deque():
                made, (keys, items) = (Mapped if isinstance(held, dict) else Many), _held_in(held)
                self.hand_on(*(value for one in keys for value in self.values(one, depth + 1, inside)))
                return [made(value) for one in items for value in self.values(one, depth + 1, inside)]
            case types.FunctionType():
                parts = [*_enclosed(held).values()]
            case functools.partial():
                parts = [held.func, *held.args, *held.keywords.values()]
            case weakref.ref():
                parts = [held()]
            case _:
                self.hand_on(held)
                parts = held_by(held)
        self.hand_on(*(value for part in parts for value in self.values(part, depth + 1, inside=True)))
        return []

    def hand_on(self, *given: Any) -> None:
        """What is given, modules and what may be some, gets to code that may do anything with it."""
        for module in (module for value in given for module, _ in modules_of(value)):
            for each in module.modules():
                self.uses.apart.add(id(each))
                self.ask(each)

    def call(self, module: nn.Module, apart: bool) -> None:
        """It is called; ``apart``: besides where its parent does it."""
        if apart:
            self.uses.apart.add(id(module))
        self.uses.calls[id(module)] += 1

    def read_tensors(self, module: nn.Module) -> None:
        """Its parent reads weights of it."""
        self.uses.read.add(id(module))
        self.ask(module)

    def ask(self, module: nn.Module, cls: Any = None) -> None:
        """It is asked what it is."""
        self.uses.asked.setdefault(id(module), set()).add(cls)

    def follow(
        self, module: nn.Module | None, function: types.FunctionType, parameter: str = "", value: Value | None = None
    ) -> None:
        """It runs, as a method of that module or not, and may be given a module, or what holds some."""
        key = id(module), id(function), parameter, key_of(value)
        if key not in self.seen:
            self.seen.add(key)
            self.waiting.append((module, function, {} if value is None else {parameter: [value]}))

    # --- one function ---

    def _read(self, module: nn.Module | None, function: types.FunctionType, given: dict[str, list[Value]]) -> None:
        names = names_in(function)
        if module is not None and not names.isdisjoint({"super", *(cls.__name__ for cls in type(module).__mro__)}):
            for name in names:
                self.reach(module, name, above=True)
        for one in _layers(function):
            code, known = one.__code__, {name: self.values(held) for name, held in _enclosed(one).items()} | given
            if source_tree(code) is not None and is_what_runs(code) and _SEES.isdisjoint(code.co_names):
                counted = not given and _is_counted(module, function)
                Reader(self, module, one, counted, known).read()
            else:
                self.hand_on(module, *(value for several in known.values() for value in several))


def _is_counted(module: Any, function: types.FunctionType) -> bool:
    """Whether who looks for what can be folded reads this function too, and counts the calls there."""
    forward = class_forward(module)
    return forward is not None and any(function is one for one in methods_of(module, forward).values())


def _enclosed(function: types.FunctionType) -> dict[str, Any]:
    """What a function has by itself, from around it and as defaults, by the names there."""
    code = function.__code__
    held: dict[str, Any] = {name: function.__globals__.get(name) for name in {*code.co_names, *names_in(function)}}
    held |= dict(zip(code.co_freevars, map(content_of, function.__closure__ or ()), strict=True))
    names, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    held |= dict(zip(reversed(names), reversed(defaults), strict=False))
    return held | (function.__kwdefaults__ or {})


_SEES = frozenset({"locals", "vars", "eval", "exec"})
"""By them a function reaches what it does not name."""


def _layers(function: types.FunctionType) -> list[types.FunctionType]:
    """A function and what it says that it wraps."""
    wrapped = function.__dict__.get("__wrapped__")
    return [function, *(_layers(wrapped) if isinstance(wrapped, types.FunctionType) else ())]


def _held_in(several: Any) -> tuple[list[Any], list[Any]]:
    """The keys and what else a container holds, whatever its class makes of going through it."""
    if isinstance(several, dict):
        return [*dict.__iter__(several)], [*dict.values(several)]
    bases: tuple[Any, ...] = _SEVERAL
    return [], next([*base.__iter__(several)] for base in bases if isinstance(several, base))


def _behind(proxy: Any) -> Any:
    """What a weakref.proxy stands for; None where that is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None
