"""The Linear whose output a BatchNorm1d normalises, multiplied in between by something, or by a child that does nothing
else: how it is found, and what computes it with the norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from normswap.attributes import Rejection, own_getattr, own_tensors
from normswap.forwards.plain import is_bare
from normswap.forwards.replaced import fingerprint
from normswap.ops.dispatch import PLAIN
from normswap.regions.flow import Attribute, Constant, Op, Value
from normswap.regions.foldings import why_apart
from normswap.regions.growing import Growing, child_called, child_of, is_own, only_user
from normswap.regions.spelling import spelled
from normswap.regions.straight import method_of, plain_value, straight

_Steps: TypeAlias = list[tuple[str, Op, int]]


def with_linear(module: nn.Module, found: Growing, taken: set[int]) -> Iterator[Growing]:
    """``found``, whose norm is a child of ``module``, with the Linear that gives its input, if one can be taken in:
    first with what it is multiplied by too, where nothing else stands behind it."""
    norm = module._modules.get(found.norm) if found.type else None
    before = linear_before(module, found.x) if type(norm) is nn.BatchNorm1d else None
    if before is None:
        return
    (linear, *between), factor = before
    child, user = child_of(module, linear[1]), found.steps[0][1]
    ops = [op for _, op, _ in (linear, *between)]
    once = all(op.users == [to] for op, to in zip(ops, (*ops[1:], user), strict=True))
    scale = (factor[0], child_of(module, ops[-1])) if factor else None
    found.apart = _why_apart((child_called(ops[0]), child), norm, once, scale)
    found.apart = found.apart or (_why_no_factor(module, child, ops[1], ops[0]) if between else "")
    if found.apart:
        return
    grown = replace(found, linear=child_called(ops[0]), factor=factor, steps=[linear, *between, *found.steps])
    behind = only_user(user) if found.last is user else None
    if behind is not None and id(behind) not in taken and (operand := _times(module, child, behind, user)) >= 0:
        yield replace(grown, steps=[*grown.steps, ("times", behind, operand)])
    yield grown


def linear_before(module: nn.Module, value: Value) -> tuple[_Steps, tuple[str, ...]] | None:
    """The Linear that gives ``value``, and what that is multiplied by on the way, as steps; the factor of the region
    where a child multiplies. None where there is no Linear."""
    given = _given(value) if isinstance(value, Op) else ()
    operand = next((i for i, one in enumerate(given) if isinstance(one, Op) and is_linear(child_of(module, one))), -1)
    linear, between, factor = value, _Steps(), tuple[str, ...]()
    if operand >= 0 and isinstance(value, Op):
        if (spelled(value) or ("",))[0] == "*":
            between = [("product", value, operand)] if is_own(given[1 - operand]) else []
        elif len(given) == 1 and not value.keywords:
            factor = factor_of(child_called(value), child_of(module, value))
            between = [("factor", value, 0)] if factor else []
        linear = given[operand] if between else value
    if not isinstance(linear, Op) or not is_linear(child_of(module, linear)):
        return None
    called = len(_given(linear)) == 1 and {*linear.keywords} <= {"input"}
    return ([("linear", linear, 0), *between], factor) if called else None


def is_linear(child: nn.Module | None) -> bool:
    """Whether it is one, or goes by that name: quantized and wrapped ones are to be told of too."""
    return isinstance(child, nn.Linear) or "Linear" in type(child).__name__


def _given(op: Op) -> tuple[Value, ...]:
    return (*op.args, *op.keywords.values())


def _times(module: nn.Module, linear: Any, op: Op, norm: Op) -> int:
    """Which operand of ``op`` the ``norm`` is, where that multiplies it by what the module itself has; else -1."""
    value, factor = product_of(op) or (None, None)
    shallow = "." not in getattr(factor, "path", "")  # what is behind a dot may be the norm's, and change in it
    if value is not norm or not shallow or _why_no_factor(module, linear, op, norm):
        return -1
    return _given(op).index(norm)


def _why_no_factor(module: nn.Module, linear: Any, product: Op, of: Op) -> str:
    """Why what a ``product`` multiplies ``of`` by is none of one value, or of one a channel."""
    for other in _given(product):
        value = plain_value(module, other.path) if other is not of and isinstance(other, Attribute) else None
        if isinstance(value, Tensor) and not has_shape_of_factor(value, linear):
            channels = linear.out_features
            shapes = f"(), (1,), ({channels},) or (1, {channels})"
            return f"self.{other.path} has shape {tuple(value.shape)}, not {shapes}"  # type: ignore[attr-defined]
    return ""


def _why_apart(linear: tuple[str, Any], norm: Any, used_once: bool, factor: tuple[str, Any] | None) -> str:
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


def has_shape_of_factor(scale: Any, linear: nn.Linear) -> bool:
    """Whether it is a number, or a tensor of one value or one a channel."""
    channels = linear.out_features
    shapes = (), (1,), (channels,), (1, channels)
    return type(scale) in (int, float) or (type(scale) in PLAIN and tuple(scale.shape) in shapes)
