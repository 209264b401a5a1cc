"""Subclasses of torch.nn's convolutions that convolve their input, or what they make of it, as timm's Conv2dSame pads
it."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.attributes import Rejection, own_getattr
from normswap.forwards.plain import calls_forward
from normswap.regions.flow import SEES_LOCALS
from normswap.regions.straight import PLAIN, method_of
from normswap.source import definition, global_named

_PADDED = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
_FORM = ("shape", "size", "ndim", "dim")


def convolves_last(module: Any) -> bool:
    """Whether what ``module`` gives is a convolution by its weight and bias of something in which their values have no
    part: another weight and bias then change the convolution alone."""
    cls = type(module)
    forward = method_of(cls, "forward")
    if not isinstance(module, _PADDED) or forward is None:
        return False
    if hasattr(cls, "weight") or hasattr(cls, "bias"):  # it hides what is registered
        return False
    if not calls_forward(cls) or own_getattr(module) is not None or not forward.__code__.co_argcount:
        return False
    base: Any = next(one for one in _PADDED if isinstance(module, one))
    if cls.forward is base.forward:  # a class that makes one of other arguments, say
        return bool(cls._conv_forward is base._conv_forward)
    owner = forward.__code__.co_varnames[0]
    own = _Function(forward, f"{owner}.weight", f"{owner}.bias")
    return own.convolves_last() and all(_is_plain(module.__dict__.get(name, own)) for name in own.reads(owner))


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in PLAIN


class _Function:
    """A function in which ``weight`` and ``bias`` are those of a convolution."""

    def __init__(self, function: types.FunctionType, weight: str, bias: str) -> None:
        self.function, self.weight, self.bias = function, weight, bias
        tree = definition(function)
        self.nodes = [] if isinstance(tree, Rejection) else [*ast.walk(tree)]
        self.body = [] if isinstance(tree, Rejection) else tree.body

    def convolves_last(self) -> bool:
        """Whether all it returns is that convolution."""
        ends = [node for node in self.nodes if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Lambda))]
        names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        match self.body[-1:]:
            case [ast.Return(value=ast.Call(func=called) as call) as last] if ends == [last]:
                return names.isdisjoint(SEES_LOCALS) and self._hands_on(call) and self._convolves(called, call)
        return False

    def reads(self, owner: str) -> set[str]:
        """The other attributes of ``owner`` that it reads, and "" where it does anything else with that."""
        read = {id(n.value): n.attr for n in self.nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
        owners = [node for node in self.nodes if isinstance(node, ast.Name) and node.id == owner]
        return {read.get(id(node), "") for node in owners} - {"weight", "bias"}

    def _hands_on(self, call: ast.Call) -> bool:
        """Whether nothing but ``call`` gets the weight and the bias; of a weight the form may be read."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        allowed = {id(node) for node in given}
        read = (node for node in self.nodes if isinstance(node, ast.Attribute) and node.attr in _FORM)
        allowed |= {id(node.value) for node in read if ast.unparse(node.value) == self.weight}
        both = [node for node in self.nodes if isinstance(node, (ast.Name, ast.Attribute))]
        named = [node for node in both if ast.unparse(node) in (self.weight, self.bias)]
        starred = any(isinstance(node, ast.Starred) for node in given)
        return not starred and all(id(node) in allowed and isinstance(node.ctx, ast.Load) for node in named)

    def _convolves(self, called: ast.expr, call: ast.Call) -> bool:
        """Whether ``call`` is a convolution by the two, or of a function that ends in one."""
        target: Any = global_named(called, self.function)
        if any(target is one for one in _CONVOLVE):
            parameters = ["input", "weight", "bias"]
        elif isinstance(target, types.FunctionType) and target is not self.function:
            parameters = [*inspect.signature(target).parameters]
        else:
            return False
        given = dict(zip(parameters, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
        spelled = {name: ast.unparse(node) for name, node in given.items()}
        weight, bias = ([name for name, node in spelled.items() if node == one] for one in (self.weight, self.bias))
        if len(weight) != 1 or len(bias) != 1:
            return False
        if not isinstance(target, types.FunctionType):
            return weight == ["weight"] and bias == ["bias"]
        return _Function(target, *weight, *bias).convolves_last()
