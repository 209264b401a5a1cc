"""One function, read from where a module is named to what is done with it."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from normswap.attributes import functions_in
from normswap.rules.expression_site import called_name
from normswap.source import content_of, global_named
from normswap.uses.syntax import as_the_first, goes_to_the_first, is_super, parameter_of, spelled
from normswap.uses.values import (
    DEEPEST,
    LISTS,
    Many,
    Mapped,
    One,
    Row,
    Value,
    children_of,
    depth_of,
    is_torchs,
    key_of,
    modules_of,
    one_of,
)

if TYPE_CHECKING:
    from normswap.uses.code import Code

_UNDER: dict[str, bool] = {"children": False, "named_children": True, "modules": False, "named_modules": True}
_UNDER |= {"values": False, "items": True}
"""What gives a module's own modules, and whether their names with them."""
_OF_FORM = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "layout", "is_cuda", "requires_grad"})
"""What a folded weight still has as it was."""
_OF_ALL = frozenset({"dtype", "device"})
_HARMLESS = frozenset(
    {"register_buffer", "register_parameter", "extra_repr", "_get_name", "keys", "__len__", "__class__"}
)
_TENSORS = frozenset({"parameters", "named_parameters"})
_CALLING = ("forward", "__call__")
_Step = tuple[ast.AST, "Value"]


class Reader:
    """Reads one function; the order of its statements is ignored. ``module``: the one whose method it is, None for
    another; ``counted``: calls of its children are looked for there by others; ``named``: what names stand for."""

    def __init__(
        self,
        code: Code,
        module: Any,
        function: types.FunctionType,
        counted: bool,
        named: Mapping[str, Iterable[Value]],
    ) -> None:
        self.code, self.module, self.function, self.counted = code, module, function, counted
        self.parents, self.nodes, self.outer = spelled(function.__code__)
        self.names: dict[str, dict[Any, Value]] = {}
        for name, values in named.items():
            for value in values:
                self._add(name, value)
        self.own = ""
        if module is not None:
            self.own, itself = as_the_first(function.__code__, one_of([module], whole=True))
            self._add(self.own, itself)

    def read(self) -> None:
        """Follow whatever may be a module from where it is named to what is done with it."""
        followed = set[Any]()
        while new := [
            (node, key, value)
            for node in self.nodes
            for key, value in self.names.get(self.own if is_super(node) else node.id, {}).items()  # type: ignore[attr-defined]
            if (node, key) not in followed
        ]:
            for node, key, value in new:
                followed.add((node, key))
                waiting: list[_Step] = [(node, value)]
                while waiting:
                    waiting += self._step(*waiting.pop())

    def _add(self, name: str, value: Value) -> None:
        if depth_of(value) > DEEPEST:
            self.code.hand_on(value)
        else:
            self.names.setdefault(name, {}).setdefault(key_of(value), value)

    # --- from an expression to the one around it ---

    def _step(self, node: ast.AST, value: Value) -> Iterator[_Step]:
        """The expressions that may be, or hold, the value of ``node`` in turn."""
        parent = self.parents[node]
        match parent:
            case ast.Attribute():
                yield from self._attribute(parent, value)
            case ast.Subscript() if parent.value is node:
                yield from self._item(parent, value)
            case ast.Call() if parent.func is node:
                self._called(value)
            case ast.Call() | ast.keyword():
                given = node if isinstance(parent, ast.Call) else parent
                call = parent if isinstance(parent, ast.Call) else self.parents[parent]
                assert isinstance(call, ast.Call)
                yield from self._argument(call, given, value)
            case ast.Starred():  # stands for each
                yield from ((parent, item) for item in self._through(value))
            case ast.Tuple(elts=parts):
                yield parent, _row(parts, node, value)
            case ast.List() | ast.Set() | ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                yield parent, Many(value)
            case ast.Dict() if node in parent.values and None not in parent.keys:
                yield parent, Mapped(value)
            case ast.DictComp() if parent.value is node:
                yield parent, Mapped(value)
            case ast.For() | ast.comprehension() if parent.iter is node:
                for item in self._through(value):
                    self._bind(parent.target, item)
            case ast.Assign():
                for target in parent.targets:
                    self._bind(target, value)
            case ast.AnnAssign():
                self._bind(parent.target, value)
            case ast.NamedExpr():
                self._bind(parent.target, value)
                yield parent, value
            case ast.IfExp() if parent.test is not node:
                yield parent, value
            case ast.BoolOp():
                yield parent, value
            case ast.Compare() if all(isinstance(op, _QUESTIONS) for op in parent.ops):
                self._question(value)
            case ast.UnaryOp(op=ast.Not()) | ast.If() | ast.While() | ast.Assert() | ast.IfExp() | ast.comprehension():
                self._question(value)
            case ast.Expr():
                pass
            case _:
                self.code.hand_on(value)

    def _bind(self, target: ast.expr, value: Value | None) -> None:
        match target, value:
            case _, None:
                pass
            case ast.Name(id=name), One() | Many() | Row() | Mapped() if name not in self.outer:
                self._add(name, value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts), Row(items) if len(parts) == len(items):
                for part, item in zip(parts, items, strict=True):
                    self._bind(part, item)
            case ast.Tuple(elts=parts) | ast.List(elts=parts), _:
                for item in self._through(value):
                    for part in parts:
                        self._bind(*((part.value, Many(item)) if isinstance(part, ast.Starred) else (part, item)))
            case _:
                self.code.hand_on(value)

    def _through(self, value: Value | None) -> list[Value]:
        """What going through it gives."""
        match value:
            case Many(item):
                return [item]
            case Row(items):
                return [item for item in items if item is not None]
            case One(held):
                found = list[Value]()
                for module, whole in held.values():
                    self._look_into(module)
                    if not isinstance(module, nn.ModuleDict):  # which gives its keys
                        found.append(one_of(children_of(module), self._are_whole(module, whole)))
                    self.code.reach(module, "__iter__")
                return found
        return []

    def _are_whole(self, module: nn.Module, whole: bool) -> bool:
        """Whether its children stand there for themselves."""
        return whole and (module is self.module or isinstance(module, LISTS))

    def _look_into(self, module: nn.Module) -> None:
        if module is not self.module:
            self.code.ask(module)

    # --- what is done with it ---

    def _question(self, value: Value) -> None:
        """It is compared, or asked whether it is true."""
        for module, _ in modules_of(value):
            for name in ("__eq__", "__bool__", "__len__", "__contains__"):
                self.code.reach(module, name)

    def _called(self, value: Value) -> None:
        for module, whole in modules_of(value):
            if module is not self.module:
                self.code.call(module, not (whole and self.counted))

    def _item(self, node: ast.Subscript, value: Value) -> Iterator[_Step]:
        if not isinstance(node.ctx, ast.Load):
            return self.code.hand_on(value)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        match value:
            case Many() if isinstance(node.slice, ast.Slice):
                yield node, value
            case Many(item) | Mapped(item):
                yield node, item
            case Row(items) if isinstance(node.slice, ast.Slice):
                yield from ((node, Many(item)) for item in items if item is not None)
            case Row(items) if isinstance(index, int):
                yield from ((node, item) for item in items[index : index + 1] if item is not None)
            case Row(items):
                yield from ((node, item) for item in items if item is not None)
            case One(held):
                for module, whole in held.values():
                    self._look_into(module)
                    self.code.reach(module, "__getitem__")
                    one = one_of(_at(module, index), self._are_whole(module, whole))
                    yield node, Many(one) if isinstance(node.slice, ast.Slice) else one

    def _attribute(self, node: ast.Attribute, value: Value) -> Iterator[_Step]:
        call = self.parents[node]
        is_called = isinstance(call, ast.Call) and call.func is node
        match value:
            case One(held):
                for module, whole in held.values():
                    yield from self._of_module(node, module, whole)
            case Mapped(item) if node.attr in ("values", "items", "get", "pop", "keys") and is_called:
                made = {"values": Many(item), "items": Many(Row((None, item))), "get": item, "pop": item}
                yield from [(call, made[node.attr])] if node.attr in made else []
            case _:
                self.code.hand_on(value)

    def _of_module(self, node: ast.Attribute, module: nn.Module, whole: bool) -> Iterator[_Step]:
        """An attribute of a module."""
        name, itself, children = node.attr, module is self.module, children_of(module)
        if not isinstance(node.ctx, ast.Load):
            self.code.hand_on(None if itself else module)
            return
        if name == "training" or (itself and name in (*_CALLING, "__self__", "dtype", "device")):
            return
        if name in (*_CALLING, "__self__"):
            yield node, one_of([module], whole)
            return
        self.code.reach(module, name)
        if not is_torchs(_definers(type(module), "__getattribute__")[0].__module__):
            self.code.hand_on(module)
        if (child := module._modules.get(name)) is not None:
            self._look_into(module)
            yield node, one_of([child], self._are_whole(module, whole))
        elif name in module._parameters or name in module._buffers:
            if itself or self._asks_for_form(node):
                self._look_into(module)
            elif self.counted and any(module is one for one in children_of(self.module)):
                self.code.read_tensors(module)
            else:
                self.code.hand_on(module)
        elif name in ("_parameters", "_buffers"):
            self.code.hand_on(None if itself else module)
        elif name == "_modules":
            self._look_into(module)
            yield node, Mapped(one_of(children, self._are_whole(module, whole)))
        elif name in module.__dict__:
            self._look_into(module)
            yield from ((node, one) for one in self.code.values(module.__dict__[name]))
        else:
            yield from self._by_method(node, module, one_of(children, self._are_whole(module, whole)))

    def _by_method(self, node: ast.Attribute, module: nn.Module, children: Value) -> Iterator[_Step]:
        """What the call of a method, or an attribute of the class, gives."""
        name, call, definers = node.attr, self.parents[node], _definers(type(module), node.attr)
        if not definers:
            if _definers(type(module), "__getattr__")[0] is not nn.Module:
                self.code.hand_on(module)
            return
        self._look_into(module)
        cls = definers[-1 if is_super(node.value) else 0]
        if not is_torchs(cls.__module__):
            self.code.hand_on(*self.code.values(vars(cls)[name]))
        elif name in _UNDER and isinstance(call, ast.Call) and call.func is node:
            under = [one for one in module.modules() if one is not module]
            found = one_of(under, whole=False) if "modules" in name else children
            yield call, Many(Row((None, found)) if _UNDER[name] else found)
        elif not (name in _HARMLESS or (name in _TENSORS and self._asks_for_form(node))):
            self.code.hand_on(module)

    def _asks_for_form(self, node: ast.AST) -> bool:
        """Whether no more is read than the dtype, the device or the sizes of a tensor, or the dtype or device of the
        first of several."""
        parent, read = self.parents[node], _OF_FORM
        while isinstance(parent, ast.Call) and (parent.func is node or goes_to_the_first(parent)):
            node, parent, read = parent, self.parents[parent], _OF_ALL
        return isinstance(parent, ast.Attribute) and parent.attr in read

    def _argument(self, call: ast.Call, node: ast.AST, value: Value) -> Iterator[_Step]:
        name, itself = called_name(call) or "", _is_only(value, self.module) and node in call.args[:1]
        plain = isinstance(call.func, ast.Name) and not isinstance(node, ast.Starred)
        match name if plain else "":
            case "isinstance":
                for module, _ in modules_of(value):
                    for cls in self._classes(call.args[1]):
                        self.code.ask(module, cls)
            case "type" | "hasattr" | "callable" | "bool" | "id" | "len":
                self._question(value)
                for module, _ in modules_of(value):
                    self._look_into(module)
            case "super":
                pass
            case "getattr" if itself:
                yield from ((call, one) for one in self.code.named_like(self.module, call.args[1]))
            case "reversed" | "list" | "tuple" | "iter" | "set":
                yield from ((call, Many(item)) for item in self._through(value))
            case "enumerate":
                yield from ((call, Many(Row((None, item)))) for item in self._through(value))
            case "zip":
                yield from ((call, Many(_row(call.args, node, item))) for item in self._through(value))
            case _ if itself and self._is_wrapped(call.func):
                pass  # it is read as the method that it is
            case _ if itself and self._is_above(call.func):
                self._above(name)
            case _:
                self._given(name, call, node, value)

    def _above(self, name: str) -> None:
        """The method of a base class runs on the module itself."""
        self.code.reach(self.module, name, above=True)
        theirs = any(is_torchs(cls.__module__) for cls in _definers(type(self.module), name))
        if theirs and name not in (*_HARMLESS, *_CALLING):
            self.code.hand_on(self.module)

    def _given(self, name: str, call: ast.Call, node: ast.AST, value: Value) -> None:
        """It is an argument of a function that is called."""
        function, given = self._function_called(call.func)
        parameter = None if function is None else parameter_of(function, call, node, given)
        if not given and "checkpoint" in name and not name.startswith(("load", "save")):
            self._called(Row((value,)))
        elif function is not None and parameter is not None:
            self.code.follow(self.module if given else None, function, parameter, value)
        else:
            self.code.hand_on(value)

    def _classes(self, node: ast.expr) -> list[Any]:
        """The types in the second argument of ``isinstance``; None for what is not known."""
        if isinstance(node, ast.Tuple):
            return [cls for part in node.elts for cls in self._classes(part)]
        found = global_named(node, self.function)
        return [found if isinstance(found, type) else None]

    def _function_called(self, node: ast.expr) -> tuple[types.FunctionType | None, int]:
        """A plain function of somebody's that is called, and how many arguments it has from that: a method has one."""
        match node:
            case ast.Attribute(value=ast.Name() as owner) if (
                owner.id == self.own and node.attr not in self.module.__dict__
            ):
                found, given = next((vars(one)[node.attr] for one in _definers(type(self.module), node.attr)), None), 1
            case _:
                found, given = global_named(node, self.function), 0
        plain = isinstance(found, types.FunctionType) and not is_torchs(str(found.__module__))
        return (found, given) if plain else (None, 0)  # type: ignore[return-value]

    def _is_wrapped(self, node: ast.expr) -> bool:
        """Whether it is what this function says that it wraps, perhaps with a cache around it."""
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        held = content_of(cells[node.id]) if isinstance(node, ast.Name) and node.id in cells else None
        return any(one is self.function.__dict__.get("__wrapped__") for one in functions_in(held))

    def _is_above(self, function: ast.expr) -> bool:
        """Whether it is a method of a base class, called by that."""
        cls = global_named(function.value, self.function) if isinstance(function, ast.Attribute) else None
        return cls in type(self.module).__mro__


_QUESTIONS = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def _definers(cls: type, name: str) -> list[type]:
    """The classes in which an attribute stands, that which hides the others first."""
    return [one for one in cls.__mro__ if name in vars(one)]


def _row(parts: list[ast.expr], node: ast.AST, value: Value) -> Value:
    """A tuple of these, of which one is that."""
    if any(isinstance(part, ast.Starred) for part in parts):
        return Many(value)
    return Row(tuple(value if part is node else None for part in parts))


def _is_only(value: Value, module: nn.Module) -> bool:
    return isinstance(value, One) and [*value.held] == [id(module)]


def _at(module: nn.Module, index: Any) -> list[nn.Module]:
    """What may stand there in a container."""
    children = children_of(module)
    if isinstance(index, int):
        return children[index : index + 1]
    if not isinstance(index, str):
        return children
    child = module._modules.get(index)
    return [] if child is None else [child]
