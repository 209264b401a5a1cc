"""The functions that may run when a model is called, and what they do with its modules."""

from __future__ import annotations

import ast
import collections
import dis
import functools
import inspect
import re
import types
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap.attributes import functions_in, modules_in
from normswap.held import held_by
from normswap.installed import class_before
from normswap.rules.expression_site import class_forward, names_in
from normswap.rules.region import methods_of
from normswap.source import is_what_runs, source_tree
from normswap.untouched import classes
from normswap.uses.reader import Reader
from normswap.uses.values import DEEPEST, Many, Mapped, Value, is_torchs, key_of, modules_of, one_of


@dataclass
class Uses:
    """Of modules by their ids: ``apart``: those that are called besides where their parents do it, or given to code
    that may do anything; ``read``: of which their parents read weights; ``calls``: how often forwards, and the methods
    that they call, call a child; ``asked``: by what types code asks what one is, None for any other question."""

    apart: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    calls: Counter[int] = field(default_factory=Counter)
    asked: dict[int, list[Any]] = field(default_factory=dict)

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


class Code:
    """The functions that may run when a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, {id(module): module for _, module in modules_in(model)}
        self.uses = Uses()
        self.waiting: list[tuple[nn.Module | None, types.FunctionType, dict[str, list[Value]]]] = []
        self.seen: set[Any] = set()
        self.counted: dict[int, set[int]] = {}
        self.kept: dict[int, tuple[Any, int, list[Value]]] = {}

    def read(self) -> Uses:
        """All of them."""
        for module in self.modules.values():
            self.reach(module, "forward")
            self.reach(module, "__call__")
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
            if not isinstance(value, staticmethod | classmethod):  # which are not given the module
                functions = [*functions_in(value)]
                for function in functions:
                    self._wait(module, function)
                if not functions and hasattr(type(value), "__get__"):
                    self._hand_on_all([module])
            if not above:
                return

    def reach_like(self, module: nn.Module, name: ast.expr) -> None:
        """All that a name which is computed may be."""
        pattern = ".*"
        if isinstance(name, ast.JoinedStr):
            pattern = "".join(re.escape(str(n.value)) if isinstance(n, ast.Constant) else ".*" for n in name.values)
        for one in {key for cls in type(module).__mro__ if not is_torchs(cls.__module__) for key in vars(cls)}:
            if not one.startswith("__") and re.fullmatch(pattern, one):
                self.reach(module, one)

    def _hooked(self, module: nn.Module, hook: Any) -> None:
        """A hook is given the module first."""
        method = isinstance(hook, types.MethodType)
        function, owner = (hook.__func__, hook.__self__) if method else (hook, None)
        names = function.__code__.co_varnames[method:] if isinstance(function, types.FunctionType) else ()
        if not names or not (owner is None or id(owner) in self.modules):
            self.values(hook)
            self._hand_on_all([module])
            return
        self._wait(owner, function)
        if _reads(function.__code__, names[0]):
            self.follow(owner, function, names[0], *one_of([module], whole=True))

    def values(self, held: Any, depth: int = 0, inside: bool = False) -> list[Value]:
        """The modules in what somebody keeps, which may be methods of modules too: those are reached. ``inside``: of an
        object."""
        if type(held) in weakref.ProxyTypes:
            held = _behind(held)
        if isinstance(held, _PLAIN):
            return []
        if isinstance(held, nn.Module):
            return one_of([held], whole=True) if id(held) in self.modules else []
        known = self.kept.get(id(held))
        if known is None or depth < known[1]:
            self.kept[id(held)] = held, depth, []  # it may hold itself
            self.kept[id(held)] = known = held, depth, self._values(held, depth, inside)
        return known[2]

    def _values(self, held: Any, depth: int, inside: bool) -> list[Value]:
        parts: list[Any] = []
        match held:
            case types.MethodType(__self__=nn.Module() as module, __func__=function):
                if getattr(function, "__name__", "") in ("forward", "__call__", "_call_impl", "_wrapped_call_impl"):
                    return self.values(module)
                if isinstance(function, types.FunctionType) and not is_torchs(str(function.__module__)):
                    self._wait(module, function)
                    return []
                parts = [module]
            case dict() | list() | tuple() | set() | frozenset() | collections.deque():
                if depth < DEEPEST:
                    made = Mapped if isinstance(held, dict) else Many
                    return [made(value) for one in _held_in(held) for value in self.values(one, depth + 1, inside)]
                self._hand_on_all([self.model] if _held_in(held) and not inside else [])  # it is not looked into
            case types.FunctionType():
                self._hand_on_all(value for several in self._enclosed(held).values() for value in several)
            case functools.partial():
                parts = [held.func, *held.args, *held.keywords.values()]
            case weakref.ref():
                parts = [held()]
            case _:
                parts = held_by(held)
        if depth < DEEPEST:
            self._hand_on_all(value for part in parts for value in self.values(part, depth + 1, inside=True))
        return []

    def hand_on(self, value: Value | None) -> None:
        """It is given to code that may do anything with it."""
        for module, _ in modules_of(value):
            self._hand_on_all([module])

    def _hand_on_all(self, given: Iterable[Any]) -> None:
        for one in given:
            if not isinstance(one, nn.Module):
                self.hand_on(one)
                continue
            for each in one.modules():
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
        known = self.uses.asked.setdefault(id(module), [])
        if cls not in known:
            known.append(cls)

    def follow(self, module: nn.Module | None, function: types.FunctionType, parameter: str, value: Value) -> None:
        """It is given a module, or what holds some."""
        self._wait(module, function, parameter, value)

    def _wait(
        self, module: nn.Module | None, function: types.FunctionType, parameter: str = "", value: Value | None = None
    ) -> None:
        key = id(module), id(function), parameter, key_of(value)
        if key not in self.seen:
            self.seen.add(key)
            self.waiting.append((module, function, {} if value is None else {parameter: [value]}))

    # --- one function ---

    def _read(self, module: nn.Module | None, function: types.FunctionType, given: dict[str, list[Value]]) -> None:
        names, own = names_in(function), [] if module is None else [module]
        if module is not None and not names.isdisjoint({"super", *(cls.__name__ for cls in type(module).__mro__)}):
            for name in names:
                self.reach(module, name, above=True)
        for one in _layers(function):
            if is_torchs(str(one.__globals__.get("__name__"))):
                continue
            code, held = one.__code__, self._enclosed(one)
            known, wrapped = {**held, **given}, one.__dict__.get("__wrapped__")
            readable = source_tree(code) is not None and is_what_runs(code) and _SEES.isdisjoint(code.co_names)
            if readable and (code.co_argcount or (wrapped is None and not code.co_flags & inspect.CO_VARARGS)):
                counted = module is not None and not given and self._is_counted(module, function)
                Reader(self, module, one, counted, known).read()
            elif not (readable and _passes_on(one)):
                self._hand_on_all([*own, *(value for several in known.values() for value in several)])

    def _is_counted(self, module: nn.Module, function: types.FunctionType) -> bool:
        """Whether who looks for what can be folded reads this function too, and counts the calls there."""
        if id(module) not in self.counted:
            forward = class_forward(module)
            own = {} if forward is None else methods_of(module, forward)
            plain = {id(one) for name, one in own.items() if name == "forward" or inspect.unwrap(one) is one}
            self.counted[id(module)] = plain
        return id(function) in self.counted[id(module)]

    def _enclosed(self, function: types.FunctionType) -> dict[str, list[Value]]:
        """The modules that a function holds by itself, in what is around it and in defaults, by their names there."""
        code = function.__code__
        held: dict[str, Any] = {name: function.__globals__.get(name) for name in code.co_names}
        held = {name: one for name, one in held.items() if isinstance(one, (nn.Module, *_SEVERAL, dict))}
        held |= dict(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        held |= dict(
            zip(reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
        )
        held |= function.__kwdefaults__ or {}
        return {name: found for name, one in held.items() if (found := self.values(one))}


_SEES = frozenset({"locals", "vars", "eval", "exec"})
"""By them a function reaches what it does not name."""


def _layers(function: types.FunctionType) -> list[types.FunctionType]:
    """A function and what it says that it wraps."""
    wrapped = function.__dict__.get("__wrapped__")
    return [function, *(_layers(wrapped) if isinstance(wrapped, types.FunctionType) else ())]


def _passes_on(function: types.FunctionType) -> bool:
    """Whether what wraps another function does nothing with its ``*args`` but hand them to one that it holds."""
    tree, code = source_tree(function.__code__), function.__code__
    if tree is None or not code.co_flags & inspect.CO_VARARGS or "__wrapped__" not in function.__dict__:
        return False
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    handed = [part for call in calls if call.func.id in code.co_freevars for part in call.args]  # type: ignore[attr-defined]
    passed = {id(part.value) for part in handed if isinstance(part, ast.Starred)}
    return all(id(node) in passed for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def _reads(code: types.CodeType, name: str) -> bool:
    """Whether a function uses its parameter of that name at all."""
    if name in code.co_cellvars:
        return True
    steps = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_FAST"))
    return any(name in one if isinstance(one, tuple) else name == one for one in steps)


def _held_in(several: Any) -> list[Any]:
    """What a container holds, whatever its class makes of going through it."""
    bases: tuple[Any, ...] = _SEVERAL
    if isinstance(several, dict):
        return [*dict.values(several)]
    return next([*base.__iter__(several)] for base in bases if isinstance(several, base))


def _behind(proxy: Any) -> Any:
    """What a weakref.proxy stands for; None where that is gone."""
    try:
        return proxy.__repr__.__self__
    except ReferenceError:
        return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
