"""The Linear whose output a BatchNorm1d normalises, multiplied in between by something, or by a child that does nothing
else: how it is found, and what computes it with the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.attributes import Rejection, own_getattr, own_tensors
from normswap.forwards.linear_scale_batch_norm import fingerprint, linear_scale_batch_norm, multiplies
from normswap.forwards.plain import is_bare, is_plain
from normswap.ops.dispatch import PLAIN
from normswap.regions.activations import activation_of
from normswap.regions.children import hands_on
from normswap.regions.flow import Attribute, Constant, Op, Value
from normswap.regions.foldings import why_apart
from normswap.regions.growing import Growing, child_of, is_own, only_user
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import ROLES
from normswap.regions.spelling import spelled
from normswap.regions.straight import method_of, plain_value, straight

MULTIPLIES: tuple[Any, ...] = ("*", torch.mul, torch.multiply, ".mul()", ".multiply()")

_Named: TypeAlias = "tuple[str, nn.Module | None]"
_CALLED = {"linear": F.linear, "batch_norm": F.batch_norm}


def with_linear(module: nn.Module, found: Growing, taken: set[int]) -> Iterator[Growing]:
    """``found``, whose norm is a child of ``module``, with the Linear that gives its input, if one can be taken in:
    first with what it is multiplied by too, where nothing else stands behind it."""
    norm = module._modules.get(found.norm) if found.type else None
    value, user = found.x, found.ops[0]
    if type(norm) is not nn.BatchNorm1d or not isinstance(value, Op):
        return
    ops, steps, factor, linear = list[Op](), [], tuple[str, ...](), value
    if (scaled := _scaled(module, value)) is not None:
        linear, (does, operand, factor) = scaled
        ops, steps = [value], [(does, value, operand)]
    child = child_of(module, linear)
    if not is_linear(child) or len(_given(linear)) != 1 or not {*linear.keywords} <= {"input"}:
        return
    name = linear.target[len("self.") :]
    users = (value, user) if steps else (user,)
    once = all(op.users == [to] for op, to in zip((linear, *ops), users, strict=True))
    scale = (factor[0], child_of(module, value)) if factor else None
    reason = _why_apart((name, child), norm, once, scale)
    found.apart = reason or (_why_no_factor(module, child, value, linear) if steps else "")
    if found.apart:
        return
    ops, steps = [linear, *ops, *found.ops], [("linear", linear, 0), *steps, *found.steps]
    grown = replace(found, linear=name, factor=factor, ops=ops, steps=steps)
    behind = only_user(user) if found.last is user else None
    if behind is not None and id(behind) not in taken and (operand := _times(module, child, behind, user)) >= 0:
        yield replace(grown, ops=[*ops, behind], steps=[*steps, ("times", behind, operand)])
    yield grown


def is_linear(child: nn.Module | None) -> bool:
    """Whether it is one, or goes by that name: quantized and wrapped ones are to be told of too."""
    return isinstance(child, nn.Linear) or "Linear" in type(child).__name__


def _given(op: Op) -> tuple[Value, ...]:
    return (*op.args, *op.keywords.values())


def _scaled(module: nn.Module, value: Op) -> tuple[Op, tuple[str, int, tuple[str, ...]]] | None:
    """The Linear whose output is multiplied, and how: ("product", which operand it is, ()), or ("factor", 0, that of
    the region)."""
    given = _given(value)
    operand = next((i for i, one in enumerate(given) if isinstance(one, Op) and is_linear(child_of(module, one))), -1)
    linear: Any = given[operand] if given else None
    if operand < 0:
        return None
    if (spelled(value) or ("",))[0] == "*":
        return (linear, ("product", operand, ())) if is_own(given[1 - operand]) else None
    factor = factor_of(str(value.target)[len("self.") :], child_of(module, value)) if len(given) == 1 else ()
    return (linear, ("factor", 0, factor)) if factor and not value.keywords else None


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
        if isinstance(value, Tensor) and not _is_factor(value, linear):
            channels = linear.out_features
            shapes = f"(), (1,), ({channels},) or (1, {channels})"
            return f"self.{other.path} has shape {tuple(value.shape)}, not {shapes}"  # type: ignore[attr-defined]
    return ""


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
    if changed := next((called for called, function in _CALLED.items() if getattr(F, called) is not function), None):
        return f"{name} stands before a norm, and torch.nn.functional.{changed} was replaced"
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
    """What computes a region with a Linear; None where only its own statements are sure to do the right thing.

    ``is_as_read`` tells whether the norm is; ``apart(norm, x, behind, activation)`` computes it of what the Linear
    gave."""

    def __init__(self, compiled: Compiled, is_as_read: Callable[[Any], bool], apart: Callable[..., Any]) -> None:
        region = compiled.region
        self.unpack, self.callees, self.called = compiled.unpack, compiled.callees, compiled.callees()
        self.linear, self.factor, self.norm, self.passes = region.linear, region.factor, region.norm, region.passes
        self.is_as_read, self.apart = is_as_read, apart
        self.activation, self.acting = region.literal_activation(), str(region.activation)
        self.operands = sum(step.does in ROLES for step in region.steps)

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        x, _, behind, scale, after, _ = self.unpack(packed)
        if (behind is not None) + (scale is not None) + (after is not None) != self.operands:  # the statements raise
            return None
        for name in self.passes:
            if not hands_on(children.get(name)):
                return None
        activation = self.activation or activation_of(children.get(self.acting))
        if activation is None or self.callees() != self.called:
            return None
        if self.factor and (scale := multiplier_at(children, self.factor)) is None:
            return None
        linear, norm = children.get(self.linear), children.get(self.norm)
        out = linear_scale_batch_norm(x, linear, scale, norm, after, activation, behind, self.is_as_read)
        return self._apart(x, linear, scale, norm, after, activation, behind) if out is None else out

    def _apart(self, x: Any, linear: Any, scale: Any, norm: Any, after: Any, activation: Any, behind: Any) -> Any:
        """The Linear, and the norm's own op."""
        if after is not None or type(x) not in PLAIN or x.dim() != 2 or not is_plain(linear, nn.Linear):
            return None
        if behind is not None and (type(behind) not in PLAIN or behind.shape != (len(x), linear.out_features)):
            return None
        if not self.is_as_read(norm) or not (scale is None or _is_factor(scale, linear)):
            return None
        return self.apart(norm, linear(x) if scale is None else linear(x) * scale, behind, activation)
