"""Subclasses of torch.nn's BatchNorms that in eval compute what their base class does and then call children of theirs
on that, one behind the other, as timm's BatchNormAct2d calls a dropout and an activation."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normswap.activation import NONE
from normswap.attributes import Rejection, own_getattr
from normswap.forwards.batch_norm import RANKS
from normswap.forwards.plain import calls_forward
from normswap.forwards.replaced import Replaced
from normswap.installed import original_class
from normswap.kinds import NORMS
from normswap.ops.dispatch import DTYPES, direct
from normswap.regions.activations import activation_of
from normswap.regions.children import hands_on
from normswap.regions.spec import Region, qualified
from normswap.source import definition, global_named, takes_another_argument

_STATISTICS = ("running_mean", "running_var")
_TAKES, _BATCH_NORM = NORMS["batch_norm"].parameters, NORMS["batch_norm"].function


def children_behind(norm: nn.Module) -> tuple[str, ...] | None:
    """The children that ``norm`` calls, in order, on what its base class computes in eval by running statistics; None
    where its forward does anything else then."""
    cls: Any = type(norm)
    if not isinstance(norm, NORMS["batch_norm"].classes) or "forward" in norm.__dict__ or own_getattr(norm) is not None:
        return None
    if not calls_forward(cls):
        return None
    names = behind_of(cls)
    if names is None or any(name in norm.__dict__ or norm._modules.get(name) is None for name in names):
        return None
    hidden = any(inspect.getattr_static(cls, name, None) is not None for name in (*_TAKES, "training", *names))
    return None if hidden else names


def behind_of(cls: Any) -> tuple[str, ...] | None:
    """The same of a class: the children that its forward calls."""
    forward = cls.forward
    if not isinstance(forward, types.FunctionType):
        return None
    tree = definition(forward)
    if isinstance(tree, Rejection) or takes_another_argument(forward) is not None:
        return None
    try:
        return _Reader(forward).returned(tree.body)
    except _AnotherError:
        return None


def is_behind(cls: Any, names: str) -> bool:
    """Whether those are what a class calls, as its forward is now."""
    return behind_of(cls) == (*names.split(),)


class Ending:
    """The norm of a region that ends in children of its own: whether it is as it was read, asked on every call."""

    def __init__(self, region: Region) -> None:
        self.type, self.behind = region.type, region.attributes["behind"]
        self.names = self.behind.split()
        self.known: dict[type, Replaced | None] = {}

    def is_of(self, norm: Any) -> bool:
        """Whether ``norm`` is a BatchNorm2d of that class, whose children are those that its forward calls."""
        cls = type(norm)
        if cls not in self.known:
            self.known[cls] = self._read(norm)
        replaced = self.known[cls]
        return replaced is not None and replaced.is_unchanged() and norm.__dict__.keys().isdisjoint(self.names)

    def _read(self, norm: Any) -> Replaced | None:
        if not isinstance(norm, nn.BatchNorm2d):
            return None
        original = original_class(norm)
        is_it = qualified(original) == self.type and is_behind(original, self.behind)
        return Replaced(original) if is_it else None


class Short:
    """The whole forward of a BatchNorm that ends in children of its own, in eval without gradients, by one op, where
    all is as it mostly is; None else. ``callees()`` gives the functions that its statements call now."""

    def __init__(self, cls: Any, behind: str, callees: Callable[[], tuple[Any, ...]]) -> None:
        *self.passes, self.last = behind.split() or [""]
        self.ranks = next((ranks for known, ranks in RANKS.items() if issubclass(cls, known)), ())
        self.callees, self.called = callees, callees()
        self.known = is_behind(cls, behind) and _BATCH_NORM in self.called

    def __call__(self, norm: Any, x: Any) -> Tensor | None:
        own = norm.__dict__
        if not self.known or own["training"] or torch.is_grad_enabled() or self.callees() != self.called:
            return None
        children = own["_modules"]
        for name in self.passes:
            if name in own or not hands_on(children.get(name)):
                return None
        activation = NONE if not self.last else None if self.last in own else activation_of(children.get(self.last))
        if activation is None:
            return None
        statistics, affine = own["_buffers"], own["_parameters"]
        mean, var = statistics.get("running_mean"), statistics.get("running_var")
        weight, bias = affine.get("weight"), affine.get("bias")
        if mean is None or var is None or not isinstance(x, Tensor) or x.dim() not in self.ranks:
            return None
        op = direct("batch_norm_eval", x, mean, var, weight, bias, autocast=True)
        if op is None or x.dtype not in DTYPES:
            return None
        numbers = activation.code, activation.low, activation.high
        return op(x, mean, var, weight, bias, own["eps"], None, *numbers)

    def before(self, general: Callable[..., Any]) -> Callable[..., Any]:
        """The forward that goes this way where it can, and else the ``general`` one."""

        def forward(norm: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
                out = self(norm, args[0])
                if out is not None:
                    return out
            return general(norm, *args, **kwargs)

        return forward


class _AnotherError(Exception):
    """A statement that does something else."""


class _Reader:
    """Reads a forward as it goes in eval, where there are running statistics."""

    def __init__(self, forward: types.FunctionType) -> None:
        self.forward = forward
        self.owner, self.x = forward.__code__.co_varnames[:2]
        self.known: dict[str, ast.expr] = {}  # what names hold that the norm is given
        self.value = ""  # the name that holds the norm, or what children made of it
        self.behind: list[str] = []

    def returned(self, body: list[ast.stmt]) -> tuple[str, ...]:
        *statements, last = body
        for statement in statements:
            self._read(statement)
        match last:
            case ast.Return(value=ast.expr() as value):
                if not self._holds_it(value):
                    self._compute(value)
                return tuple(self.behind)
        raise _AnotherError

    def _read(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case ast.Expr(value=ast.Call(func=function)) if global_named(function, self.forward) is torch._assert:
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != self.owner:
                if isinstance(value, ast.Call):
                    self._compute(value)
                    self.value = name
                elif name in (self.x, self.value):
                    raise _AnotherError
                else:
                    self._check_plain(value)
                    self.known[name] = value
                return
            case ast.If(test=test, body=body, orelse=orelse):
                self._check_plain(test)
                truth = self._truth(test)
                for statement in (*body, *orelse) if truth is None else body if truth else orelse:
                    self._read_either(statement) if truth is None else self._read(statement)
                return
        raise _AnotherError

    def _read_either(self, node: ast.stmt) -> None:
        """A statement that may be run or not: a number or a flag is assigned, and nobody knows it then."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in (self.x, self.value, self.owner):
                self._check_plain(value)
                self.known[name] = ast.Name("", ast.Load())
                return
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
        raise _AnotherError

    def _compute(self, node: ast.expr) -> None:
        """Take in a call of the norm on the input, or of a child on what there is."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=self.owner), attr=child), args=[given], keywords=[]):
                if isinstance(given, ast.Call):
                    self._compute(given)
                elif not self._holds_it(given):
                    raise _AnotherError
                self.behind.append(child)
            case ast.Call(func=function, args=[ast.Name(id=self.x), *rest], keywords=keywords) if not self.value:
                given_by_name = {str(keyword.arg): keyword.value for keyword in keywords}
                taken = dict(zip(_TAKES, rest, strict=False)) | given_by_name
                if global_named(function, self.forward) is not _BATCH_NORM or not self._is_the_norm(taken):
                    raise _AnotherError
            case _:
                raise _AnotherError

    def _holds_it(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.value

    def _is_the_norm(self, given: dict[str, ast.expr]) -> bool:
        read = ("weight", "bias", "eps", *_STATISTICS)
        if {*given} != {*_TAKES} or not all(self._is_own(given[name], name) for name in read):
            return False
        self._check_plain(given["momentum"])
        return self._truth(given["training"]) is False

    def _check_plain(self, node: ast.expr) -> None:
        """Raise _AnotherError for an expression that does more than read attributes of self and compare."""
        for part in ast.walk(node):
            named = isinstance(part, ast.Name) and part.id not in (self.owner, *self.known)
            if named or not isinstance(part, _PLAIN):
                raise _AnotherError

    def _is_own(self, node: ast.expr, name: str) -> bool:
        """Whether an expression is ``self.name``."""
        match node:
            case ast.Attribute(value=ast.Name(id=self.owner), attr=attribute):
                return bool(attribute == name)
            case ast.Name(id=known) if known in self.known:
                return self._is_own(self.known[known], name)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self._truth(test)
                return truth is not None and self._is_own(body if truth else orelse, name)
        return False

    def _truth(self, node: ast.expr) -> bool | None:
        """That of a condition in eval with running statistics; None where it depends on anything else."""
        match node:
            case ast.Constant(value=bool() as value):
                return value
            case ast.Name(id=known) if known in self.known:
                return self._truth(self.known[known])
            case ast.Attribute(value=ast.Name(id=self.owner), attr="training"):
                return False
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._truth(operand)
                return None if truth is None else not truth
            case ast.BoolOp(op=operator, values=values):
                found = [self._truth(value) for value in values]
                decides = isinstance(operator, ast.Or)
                return decides if decides in found else None if None in found else not decides
            case ast.Compare(
                left=ast.Attribute(value=ast.Name(id=self.owner), attr=attribute),
                ops=[ast.Is() | ast.IsNot() as how],
                comparators=[ast.Constant(value=None)],
            ) if attribute in _STATISTICS:
                return isinstance(how, ast.IsNot)
        return None


_PLAIN = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.IfExp, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not),
    *(ast.Compare, ast.Is, ast.IsNot, ast.Load),
)
