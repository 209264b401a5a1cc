"""Runs of consecutive children of an nn.Sequential that are Linear -> [scale] -> BatchNorm1d. The scale is a module
whose whole forward multiplies its input by a Parameter, buffer or number of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx, nn

from normswap import source, tracing
from normswap.forwards.linear_scale_batch_norm import fingerprint
from normswap.plan import Match, Reason, Refusal
from normswap.rules.expression_site import MULTIPLICATION, class_forward, not_rewritable
from normswap.rules.live_numbers import name_or_number, numbers_of
from normswap.rules.module_site import settled_type, why_not_linear_and_batch_norm

_KIND = "linear_scale_batch_norm"
_aten = torch.ops.aten


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
    child = module._modules[name]
    return child is not None and issubclass(settled_type(child), expected)


def multiplied_by(module: nn.Module | None) -> str | None:
    """The attribute by which ``module`` multiplies its input, where that is all it does; None for any other module."""
    forward = None if module is None else class_forward(module)
    if module is None or forward is None or module._modules or tracing.own_getattr(module) is not None:
        return None
    scanned = source.scan(forward)
    if isinstance(scanned, tracing.Rejection) or len(scanned.reads) != 1 or len(scanned.operations) != 1:
        return None
    return scanned.reads[0] if MULTIPLICATION.issuperset(scanned.operations) and _traces(module, scanned) else None


def _traces(module: nn.Module, scanned: source.Scan) -> bool:
    """True when the graph is one product of the argument and the one attribute read."""
    numbers = numbers_of(module, scanned.reads)
    values = dict.fromkeys(numbers, 0.734375)
    tensors = [name for name in scanned.reads if name not in numbers]
    traced = tracing.trace(module, tensors, (3, _width(module, tensors)), training=True, values=values)
    if isinstance(traced, tracing.Rejection) or len(traced.operations) != 1:
        return False
    (product,) = traced.operations
    factor = next((argument for argument in product.args if argument is not traced.argument), None)
    found = traced.inputs.get(factor) if isinstance(factor, fx.Node) else name_or_number(factor, values)
    exact = product.target is _aten.mul.Tensor and len(product.args) == 2 and traced.argument in product.args
    return exact and not product.kwargs and traced.result is product and found == scanned.reads[0]


def _width(module: nn.Module, tensors: list[str]) -> int:
    sizes = [
        tensor.shape[-1]
        for name in tensors
        if (tensor := tracing.own_tensors(module).get(name)) is not None and tensor.dim()
    ]
    return max(sizes, default=2)


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
    hooked = "forward" in scale.__dict__ or scale._forward_hooks or scale._forward_pre_hooks
    return Refusal(_KIND, Reason.CHILD, f"self.{run.scale} carries hooks") if hooked else None


def _as_data(module: nn.Module, run: _Run) -> dict[str, str]:
    data = {"linear": run.linear, "batch_norm": run.batch_norm}
    if run.scale:
        forward = class_forward(module.get_submodule(run.scale))
        data |= {"scale": run.scale, "attribute": run.attribute, "code": fingerprint(forward)}
    return data
