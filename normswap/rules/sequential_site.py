"""Runs of consecutive children of an nn.Sequential that are Linear -> [scale] -> BatchNorm1d. The scale is a module
whose whole forward multiplies its input by a Parameter, buffer or number of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from normswap.attributes import Rejection, own_getattr, own_tensors
from normswap.forwards.linear_scale_batch_norm import fingerprint
from normswap.plan import Match, Reason, Refusal
from normswap.regions.flow import Attribute, Constant, Op, Value
from normswap.regions.spelling import spelled
from normswap.regions.straight import plain_value, straight
from normswap.rules.expression_site import class_forward, not_rewritable
from normswap.rules.module_site import HOOKS, settled_type, why_not_linear_and_batch_norm

_KIND = "linear_scale_batch_norm"


class _Run(NamedTuple):
    """The names of consecutive children, and what the scale between them multiplies by: "" where there is none."""

    linear: str
    scale: str
    attribute: str
    batch_norm: str


def match_sequential(module: nn.Module) -> Match | Refusal | None:
    """Match an nn.Sequential (or a subclass that adds nothing to its forward) with at least one such run."""
    found = list(_runs(module))
    if not found:
        return None
    if type(module).__iter__ is not nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Refusal(_KIND, Reason.UNSUPPORTED, f"{type(module).__name__} has its own __iter__")
    if (refusal := not_rewritable(module, _KIND)) is not None:
        return refusal
    refusals = [_why_no_run(module, run) for run in found]
    runs = [_as_data(module, run) for run, refusal in zip(found, refusals, strict=True) if refusal is None]
    return Match(_KIND, {"runs": runs}) if runs else refusals[0]


def _runs(module: nn.Module) -> Iterator[_Run]:
    """Every run of children of the right types, whether they are plain ones or not."""
    names = list(module._modules)
    for position, name in enumerate(names):
        if not _is(module, name, nn.Linear):
            continue
        following = names[position + 1 : position + 3]
        if following and _is(module, following[0], nn.BatchNorm1d):
            yield _Run(name, "", "", following[0])
        elif len(following) == 2 and _is(module, following[1], nn.BatchNorm1d):
            attribute = multiplied_by(module._modules[following[0]])
            if attribute is not None:
                yield _Run(name, following[0], attribute, following[1])


def _is(module: nn.Module, name: str, expected: type[nn.Module]) -> bool:
    return issubclass(settled_type(module._modules[name]), expected)  # type: ignore[arg-type]


def multiplied_by(module: nn.Module | None) -> str | None:
    """The attribute by which ``module`` multiplies its input, where that is all it does; None for any other module."""
    forward = None if module is None else class_forward(module)
    if module is None or forward is None or module._modules or own_getattr(module) is not None:
        return None
    read = straight(module, forward)
    if isinstance(read, Rejection) or len(read.ways) > 1 or read.tested or read.called:
        return None
    (way,) = read.ways
    value, factor = factor_of(way.result) or (None, None)
    if not isinstance(factor, Attribute) or value is not way.argument or len(way.ops) != 1:
        return None
    is_number = type(plain_value(module, factor.path)) in (int, float)
    is_own = is_number or isinstance(own_tensors(module).get(factor.path), torch.Tensor)
    return factor.path if is_own and [*read.reads] == [factor.path] else None


def factor_of(value: Value) -> tuple[Value, Value] | None:
    """(what is multiplied, by what) of a product with an attribute of self or a number; None for anything else."""
    name, given = (isinstance(value, Op) and spelled(value)) or ("", {})
    pair = [given["input"], given["other"]] if name == "*" else []
    for one, other in (pair, pair[::-1]) if pair else ():
        if isinstance(other, (Attribute, Constant)):
            return one, other
    return None


def _why_no_run(module: nn.Module, run: _Run) -> Refusal | None:
    if (refusal := why_not_linear_and_batch_norm(_KIND, module, run.linear, run.batch_norm)) is not None:
        return refusal
    scale = module._modules[run.scale] if run.scale else None
    if scale is None:
        return None
    channels = module._modules[run.linear].out_features  # type: ignore[union-attr]
    value = getattr(scale, run.attribute)
    if isinstance(value, torch.Tensor) and tuple(value.shape) not in ((), (1,), (channels,), (1, channels)):
        return Refusal(_KIND, Reason.UNSUPPORTED, f"self.{run.scale} multiplies by a {tuple(value.shape)} tensor")
    hooked = "forward" in scale.__dict__ or any(getattr(scale, hooks) for hooks in HOOKS)
    return Refusal(_KIND, Reason.CHILD, f"self.{run.scale} carries hooks") if hooked else None


def _as_data(module: nn.Module, run: _Run) -> dict[str, str]:
    data = {"linear": run.linear, "batch_norm": run.batch_norm}
    if run.scale:
        forward = class_forward(module.get_submodule(run.scale))
        data |= {"scale": run.scale, "attribute": run.attribute, "code": fingerprint(forward)}
    return data
