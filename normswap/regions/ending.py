"""Subclasses of torch.nn's BatchNorms that in eval compute what their base class does and then call children of theirs
on that, one behind the other, as timm's BatchNormAct2d calls a dropout and an activation."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from normswap.activation import NONE
from normswap.attributes import own_getattr
from normswap.forwards.batch_norm import RANKS
from normswap.forwards.plain import calls_forward
from normswap.forwards.replaced import Replaced
from normswap.installed import called_class
from normswap.kinds import NORMS
from normswap.ops.at_once import AtOnce, NormAct
from normswap.ops.dispatch import DTYPES, direct
from normswap.regions.activations import activation_of, numbers_of
from normswap.regions.children import hands_on
from normswap.regions.flow import Attribute, Constant, Value
from normswap.regions.growing import child_called
from normswap.regions.spec import Region, qualified
from normswap.regions.spelling import constant, spelled
from normswap.regions.straight import UNKNOWN, Straight, StraightReader, Way, straight
from normswap.source import global_named

_STATISTICS = ("running_mean", "running_var")
_HELD = (*_STATISTICS, "weight", "bias")
_READ = (*_HELD, "eps")
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
    module: nn.Module = object.__new__(cls)  # none of its code runs
    module.__dict__.update(_parameters={}, _buffers={}, _modules={})
    read = straight(module, cls.forward, _InEval) if isinstance(cls.forward, types.FunctionType) else None
    if not isinstance(read, Straight) or read.called:
        return None
    found = {_behind(way) for way in read.ways}
    return found.pop() if len(found) == 1 else None


class _InEval(StraightReader):
    """Reads a forward as it goes in eval, where there are running statistics; a branch on anything else that self has
    may go either way."""

    def _read(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Call(func=function)) if global_named(function, self.function) is torch._assert:
                return
        super()._read(node)

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return Constant(value=self._truth(node))
        found = super().value(node)
        return Constant(value=False) if isinstance(found, Attribute) and found.path == "training" else found

    def _truth(self, node: ast.expr) -> bool:
        either = isinstance(node, ast.Attribute) and self._tested(node) is UNKNOWN
        return self.way.either() if either else super()._truth(node)

    def _tested(self, node: ast.expr) -> Any:
        match self.value(node):
            case Constant(value=value):
                return value
            case Attribute(path=path):
                return path if path in _STATISTICS else UNKNOWN  # they are there, and no None
        return super()._tested(node)


def _behind(way: Way) -> tuple[str, ...] | None:
    """The children that are called behind the norm of the argument; None where anything else is computed."""
    name, given = (spelled(way.ops[0]) if way.ops else None) or ("", {})
    own = all(isinstance(value := given.get(read), Attribute) and value.path == read for read in _READ)
    if name != "batch_norm" or given["input"] is not way.argument or not own:
        return None
    if constant(given["training"]) is not False or not isinstance(given["momentum"], (Attribute, Constant)):
        return None
    chained = all(call.args == (before,) and not call.keywords for before, call in pairwise(way.ops))
    children = tuple(map(child_called, way.ops[1:]))
    return children if chained and all(children) and way.result is way.ops[-1] else None


def is_behind(cls: Any, names: str) -> bool:
    """Whether those are what a class calls, as its forward is now."""
    return behind_of(cls) == (*names.split(),)


def ending_of(region: Region, norm: Any) -> Replaced | None:
    """The forward of the class of ``norm``, a BatchNorm2d, where that is the one that ``region`` was read with."""
    if not isinstance(norm, nn.BatchNorm2d):
        return None
    original: Any = called_class(norm)
    is_it = original is not None and qualified(original) == region.type
    return Replaced(original) if is_it and is_behind(original, region.attributes["behind"]) else None


class Short:
    """The whole forward of a BatchNorm that ends in children of its own, in eval without gradients, by one op, where
    all is as it mostly is; None else. ``callees()`` gives the functions that its statements call now."""

    def __init__(self, cls: Any, behind: str, callees: Callable[[], tuple[Any, ...]]) -> None:
        *self.passes, self.last = behind.split() or [""]
        self.ranks = next((ranks for known, ranks in RANKS.items() if issubclass(cls, known)), ())
        self.callees, self.called = callees, callees()
        self.known = is_behind(cls, behind) and _BATCH_NORM in self.called
        how = tuple(self.passes), self.last or None, numbers_of, callees, self.called, self.ranks
        self.at_once = AtOnce(NormAct(*how) if self.known else None)

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
        if mean is None or var is None or not isinstance(x, Tensor) or x.dim() not in self.ranks:
            return None
        kept_elsewhere = "weight" not in affine or "bias" not in affine  # by a parametrization, say
        if kept_elsewhere or not own.keys().isdisjoint(_HELD) or not own.get("eps", 0) > 0:
            return None
        weight, bias = affine["weight"], affine["bias"]
        op = direct("batch_norm_eval", x, mean, var, weight, bias, autocast=True)
        if op is None or x.dtype not in DTYPES:
            return None
        numbers = activation.code, activation.low, activation.high
        return op(x, mean, var, weight, bias, own["eps"], None, *numbers)

    def before(self, general: Callable[..., Any]) -> Callable[..., Any]:
        """The forward that goes this way where it can, and else the ``general`` one."""

        def forward(norm: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
                out = self.at_once.call(norm, args[0])
                if out is None:
                    out = self(norm, args[0])
                if out is not None:
                    return out
            return general(norm, *args, **kwargs)

        return forward
