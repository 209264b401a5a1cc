"""The Linear whose output a BatchNorm1d normalises, multiplied in between by something, or by a child that does nothing
else: how it is found, and what computes it with the norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from normswap.activation import Activation
from normswap.attributes import Rejection, own_getattr, own_tensors
from normswap.forwards.linear_scale_batch_norm import fingerprint, linear_scale_batch_norm, multiplies
from normswap.forwards.plain import is_bare, is_plain
from normswap.ops.dispatch import PLAIN
from normswap.regions.flow import Attribute, Constant, Op, Value
from normswap.regions.foldings import why_apart
from normswap.regions.growing import Growing, is_own
from normswap.regions.spec import Region
from normswap.regions.spelling import spelled
from normswap.regions.straight import method_of, plain_value, straight

KIND = "linear_scale_batch_norm"
MULTIPLIES: tuple[Any, ...] = ("*", torch.mul, torch.multiply, ".mul()", ".multiply()")

_ChildOf: TypeAlias = "Callable[[Op], nn.Module | None]"
_Named: TypeAlias = "tuple[str, nn.Module | None]"


def with_linear(found: Growing, norm: nn.Module | None, child_of: _ChildOf) -> Growing | None:
    """``found``, whose norm is the child ``norm``, and the Linear that gives its input; None where none can be taken
    in."""
    value, user = found.x, found.ops[0]
    if type(norm) is not nn.BatchNorm1d or not isinstance(value, Op):
        return None
    linear: Any = value
    ops, steps, factor = list[Op](), [], tuple[str, ...]()
    if (scaled := _scaled(value, child_of)) is not None:
        does, operand, factor = scaled
        linear, ops, steps = value.args[operand], [value], [(does, value, operand)]
    child = child_of(linear)
    if not is_linear(child) or len(linear.args) != 1 or linear.keywords:
        return None
    name = linear.target[len("self.") :]
    users = (value, user) if steps else (user,)
    once = all(op.users == [to] for op, to in zip((linear, *ops), users, strict=True))
    if reason := _why_apart((name, child), norm, once, (factor[0], child_of(value)) if factor else None):
        found.apart = reason
        return None
    ops, steps = [linear, *ops, *found.ops], [("linear", linear, 0), *steps, *found.steps]
    return replace(found, kind=KIND, linear=name, factor=factor, ops=ops, steps=steps)


def is_linear(child: nn.Module | None) -> bool:
    """Whether it is one, or goes by that name: quantized and wrapped ones are to be told of too."""
    return isinstance(child, nn.Linear) or "Linear" in type(child).__name__


def _scaled(value: Op, child_of: _ChildOf) -> tuple[str, int, tuple[str, ...]] | None:
    """How the output of a Linear is multiplied: ("product", which operand it is, ()), or ("factor", 0, that of the
    region)."""
    from_linear = [isinstance(arg, Op) and is_linear(child_of(arg)) for arg in value.args]
    if value.target in MULTIPLIES and len(value.args) == 2 and any(from_linear):
        operand = from_linear.index(True)
        return ("product", operand, ()) if is_own(value.args[1 - operand]) else None
    if from_linear == [True] and not value.keywords:
        factor = factor_of(str(value.target)[len("self.") :], child_of(value))
        return ("factor", 0, factor) if factor else None
    return None


def run_before(norm: nn.Module, children: Sequence[_Named]) -> tuple[str, tuple[str, ...], str]:
    """Of the ``children`` of an nn.Sequential before ``norm``, a BatchNorm1d: the Linear, the factor between them if
    there is one, and why the Linear is apart; "" for none."""
    *_, before, last = [("", None), ("", None), *children]
    if is_linear(last[1]):
        return last[0], (), _why_apart(last, norm, True)
    factor = factor_of(*last) if is_linear(before[1]) else ()
    return (before[0], factor, _why_apart(before, norm, True, last)) if factor else ("", (), "")


def _why_apart(linear: tuple[str, Any], norm: Any, used_once: bool, factor: tuple[str, Any] | None = None) -> str:
    name, child = linear
    if reason := why_apart(child, used_once, classes=(nn.Linear,)):
        return f"{name} {reason}"
    if child.out_features != norm.num_features:
        return f"{name} gives other channels than the norm takes"
    if factor is not None and not is_bare(factor[1].__dict__):
        return f"{factor[0]} carries hooks, or a forward of its own"
    return ""


def factor_of(name: str, child: Any) -> tuple[str, ...]:
    """The ``factor`` of a region for the child ``name``; nothing where that does not only multiply."""
    attribute = multiplied_by(child)
    return () if attribute is None else (name, attribute, fingerprint(type(child).forward))


def multiplied_by(module: Any) -> str | None:
    """The attribute by which ``module`` multiplies its input, where that is all it does; None for anything else."""
    forward = method_of(type(module), "forward")
    if forward is None or module._modules or own_getattr(module) is not None:
        return None
    read = straight(module, forward)
    if isinstance(read, Rejection) or len(read.ways) > 1 or read.tested or read.called:
        return None
    (way,) = read.ways
    value, factor = product_of(way.result) or (None, None)
    if not isinstance(factor, Attribute) or value is not way.argument or len(way.ops) != 1:
        return None
    is_number = type(plain_value(module, factor.path)) in (int, float)
    is_own = is_number or isinstance(own_tensors(module).get(factor.path), Tensor)
    return factor.path if is_own and [*read.reads] == [factor.path] else None


def product_of(value: Value) -> tuple[Value, Value] | None:
    """(what is multiplied, by what) of a product with an attribute of self or a number; None for anything else."""
    name, given = (isinstance(value, Op) and spelled(value)) or ("", {})
    if name != "*":
        return None
    pair = given["input"], given["other"]
    return next(((one, by) for one, by in (pair, pair[::-1]) if isinstance(by, (Attribute, Constant))), None)


def _is_factor(scale: Any, linear: nn.Linear) -> bool:
    """Whether it is a number, or a tensor of one value or one a channel."""
    channels = linear.out_features
    shapes = (), (1,), (channels,), (1, channels)
    return type(scale) in (int, float) or (type(scale) in PLAIN and tuple(scale.shape) in shapes)


def multiplier_at(children: Mapping[str, Any], factor: tuple[str, ...]) -> Any:
    """What the child of ``factor`` multiplies by now; None where it may do anything else."""
    name, attribute, code = factor
    child: Any = children.get(name)
    return getattr(child, attribute) if multiplies(child, code) else None


class Projected:
    """What computes the Linear of ``region``, and the norm with it where it can. ``is_as_read`` tells whether the norm
    is."""

    def __init__(self, region: Region, is_as_read: Callable[[Any], bool]) -> None:
        self.name, self.factor, self.is_as_read = region.linear, region.factor, is_as_read

    def __call__(
        self, children: Mapping[str, Any], norm: Any, x: Tensor, scale: Any, behind: Any, activation: Activation
    ) -> tuple[Any, Any]:
        """(x, the result of the region), (what the norm is of, None) where the two are computed apart, or (None, None)
        where only the region's own statements are sure to do the right thing."""
        if self.factor and (scale := multiplier_at(children, self.factor)) is None:
            return None, None
        linear: Any = children.get(self.name)
        out = linear_scale_batch_norm(x, linear, scale, norm, None, activation, behind, self.is_as_read)
        if out is not None:
            return x, out
        if not is_plain(linear, nn.Linear) or x.dim() != 2 or not self.is_as_read(norm):
            return None, None
        if behind is not None and (type(behind) not in PLAIN or behind.shape != (len(x), linear.out_features)):
            return None, None
        if scale is not None and not _is_factor(scale, linear):
            return None, None
        return linear(x) if scale is None else linear(x) * scale, None
