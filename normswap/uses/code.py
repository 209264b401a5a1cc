"""The functions that may run when a model is called, and what they do with its modules."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normswap.attributes import functions_in, modules_in
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
    """Those of the modules of ``model`` in the forwards of all and in what these call."""
    with classes([(module, class_before(module)) for _, module in modules_in(model)]):  # as they were written
        return Code(model).read()


class Code:
    """The functions that may run when a model is called."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {id(module): module for _, module in modules_in(model)}
        self.uses = Uses()
        self.waiting: list[tuple[nn.Module | None, types.FunctionType, dict[str, list[Value]]]] = []
        self.seen: set[Any] = set()
        self.counted: dict[int, set[int]] = {}

    def read(self) -> Uses:
        """All of them."""
        for module in self.modules.values():
            self.reach(module, "forward")
            self.reach(module, "__call__")
        while self.waiting:
            self._read(*self.waiting.pop())
        return self.uses

    def reach(self, module: nn.Module, name: str, above: bool = False) -> None:
        """What is run by the name on a module; ``above``: or what that hides."""
        self.values(module.__dict__.get(name))
        for cls in type(module).__mro__:
            if not is_torchs(cls.__module__) and name in vars(cls):
                value = vars(cls)[name]
                for function in () if isinstance(value, staticmethod | classmethod) else functions_in(value):
                    self._wait(module, function)
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

    def values(self, held: Any, depth: int = 0) -> list[Value]:
        """The modules in what somebody keeps, which may be methods of modules too: those are reached."""
        if isinstance(held, nn.Module):
            return one_of([held], whole=True) if id(held) in self.modules else []
        if isinstance(held, types.MethodType) and isinstance(held.__self__, nn.Module):
            if isinstance(held.__func__, types.FunctionType):
                self._wait(held.__self__, held.__func__)
        elif isinstance(held, types.FunctionType) and depth < DEEPEST:
            self._hand_on_all(self._enclosed(held, depth + 1))
        elif isinstance(held, functools.partial):
            for one in (held.func, *held.args, *held.keywords.values()):
                for value in self.values(one, depth + 1):
                    self.hand_on(value)
        elif isinstance(held, list | tuple | set | dict) and depth < DEEPEST:
            made, parts = (Mapped, [*held.values()]) if isinstance(held, dict) else (Many, [*held])
            return [made(value) for one in parts for value in self.values(one, depth + 1)]
        return []

    def hand_on(self, value: Value | None) -> None:
        """It is given to code that may do anything with it."""
        for module, _ in modules_of(value):
            for one in module.modules():
                self.uses.apart.add(id(one))
                self.ask(one)

    def _hand_on_all(self, named: Mapping[str, Iterable[Value]]) -> None:
        for value in (one for several in named.values() for one in several):
            self.hand_on(value)

    def call(self, module: nn.Module, apart: bool) -> None:
        """It is called; ``apart``: besides where its parent does it."""
        if apart:
            self.uses.apart.add(id(module))
        self.uses.calls[id(module)] += 1

    def read_tensors(self, module: nn.Module) -> None:
        """Its parent reads weights of it."""
        self.uses.read.add(id(module))

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
        if key not in self.seen and not is_torchs(str(function.__module__)):
            self.seen.add(key)
            self.waiting.append((module, function, {} if value is None else {parameter: [value]}))

    def _read(self, module: nn.Module | None, function: types.FunctionType, given: dict[str, list[Value]]) -> None:
        inner = inspect.unwrap(function)
        if not isinstance(inner, types.FunctionType) or not inner.__code__.co_argcount:
            return
        names, known = names_in(inner), {**self._enclosed(inner), **given}
        if module is not None and not names.isdisjoint({"super", *(cls.__name__ for cls in type(module).__mro__)}):
            for name in names:
                self.reach(module, name, above=True)
        if source_tree(inner.__code__) is None or not is_what_runs(inner.__code__):
            self._hand_on_all({**known, "self": one_of([] if module is None else [module], whole=True)})
            return
        counted = module is not None and not given and self._is_counted(module, function)
        Reader(self, module, inner, counted, known).read()

    def _is_counted(self, module: nn.Module, function: types.FunctionType) -> bool:
        """Whether who looks for what can be folded reads this function too, and counts the calls there."""
        if id(module) not in self.counted:
            forward = class_forward(module)
            own = {} if forward is None else methods_of(module, forward)
            plain = {id(one) for name, one in own.items() if name == "forward" or inspect.unwrap(one) is one}
            self.counted[id(module)] = plain
        return id(function) in self.counted[id(module)]

    def _enclosed(self, function: types.FunctionType, depth: int = 0) -> dict[str, list[Value]]:
        """The modules that a function holds by itself, in what is around it, by their names there."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: _content(cell) for name, cell in cells}
        for name in function.__code__.co_names:
            if isinstance(found := function.__globals__.get(name), nn.Module):
                held[name] = found
        return {name: self.values(one, depth) for name, one in held.items()}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
