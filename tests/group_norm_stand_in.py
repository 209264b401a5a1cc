"""The native ops of group_norm, by the formulas of csrc/group_backward/group_backward.cuh in float32 on any tensor,
with the arguments that the schemas have."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from normswap import reference
from normswap.activation import CODES, Activation
from normswap.ops import dispatch

NAMES = [*CODES]


def arguments_of(op: str) -> list[str]:
    """The names of the arguments in the schema of ``op``, in order."""
    declared = (Path(__file__).parent.parent / "csrc/abi/register.cpp").read_text()
    (schema,) = re.findall(rf"\"{op}\((.*?)\) -> ", re.sub(r'"\s*\n\s*"', "", declared))
    return [argument.split()[-1] for argument in schema.split(", ")]


def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    channels_last: bool,
    activation: int,
    low: float,
    high: float,
    residual: Tensor | None,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    regime: int,
) -> None:
    check_layout(channels_last, input, out, residual)
    if input.numel() == 0:
        return
    rows = input.float().reshape(len(input), num_groups, -1)
    if mean is not None and rstd is not None:
        mean.copy_(rows.mean(-1).flatten())
        rstd.copy_((rows.var(-1, correction=0) + eps).rsqrt().flatten())
    after = Activation(NAMES[activation], low, high)
    wide = [None if t is None else t.to(out.dtype) for t in (input, weight, bias)]
    out.copy_(reference.group_norm(wide[0], num_groups, *wide[1:], eps, after, residual=residual))  # type: ignore[arg-type]


def group_norm_recorded(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: int,
    low: float,
    high: float,
    residual: Tensor | None,
    wide: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The output and all means, then all rstds, of a dense input; neither where something lies otherwise."""
    if not lie_alike(input, residual):
        return None, None
    out = torch.empty_like(input, dtype=torch.float32 if wide else input.dtype)
    statistics = torch.empty(2 * len(input) * num_groups)
    behind = activation, low, high, residual, out, *statistics.chunk(2), 0
    group_norm(input, weight, bias, num_groups, eps, not input.is_contiguous(), *behind)
    return out, statistics


def group_norm_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    channels_last: bool,
    activation: int,
    low: float,
    high: float,
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    grad_residual: Tensor | None,
    regime: int,
) -> None:
    check_layout(channels_last, grad, input, residual, grad_input, grad_residual)
    if input.numel() == 0:
        return
    assert grad_residual is None or grad_residual.dtype == grad.dtype
    assert residual is None or (activation and residual.dtype == grad.dtype)
    shape = (len(input), num_groups, input.shape[1] // num_groups, -1)
    mean, rstd = (t.view(shape[:2]) for t in (mean, rstd))
    d = input.float().reshape(shape) - mean[..., None, None]
    gain = rstd[..., None] * (1.0 if weight is None else weight.float().reshape(shape[1:3]))
    z = d * gain[..., None] + (0.0 if bias is None else bias.float().reshape(*shape[1:3], 1))
    if residual is None or NAMES[activation] != "relu":
        z = z.to(grad.dtype) if residual is None else (z.to(grad.dtype) + residual.reshape(shape))
    else:
        z = residual.reshape(shape)  # what came out
    g = slope_times(Activation(NAMES[activation], low, high), z.float(), grad.float().reshape(shape))
    scaled = g * gain[..., None]
    a, b = scaled.mean((2, 3), keepdim=True), (scaled * d).mean((2, 3), keepdim=True) * rstd[..., None, None] ** 2
    for to, found in (
        (grad_input, scaled - d * b - a),
        (grad_weight, (g * d * rstd[..., None, None]).sum((0, 3))),
        (grad_bias, g.sum((0, 3))),
        (grad_residual, g),
    ):
        if to is not None:
            to.copy_(found.reshape(to.shape))


def group_norm_backward_or_none(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    statistics: Tensor,
    num_groups: int,
    activation: int,
    low: float,
    high: float,
    *wanted: bool,
) -> tuple[Tensor | None, ...]:
    """Those that are ``wanted``: of the input, weight, bias and residual; none where something lies otherwise."""
    if input.numel() == 0 or not lie_alike(input, grad, residual):
        return (None,) * 4
    made = [torch.empty_like(t) if want else None for t, want in zip((input, weight, bias, grad), wanted, strict=True)]
    of = grad, input, weight, bias, residual, *statistics.chunk(2), num_groups, not input.is_contiguous()
    group_norm_backward(*of, activation, low, high, *made, 0)  # type: ignore[arg-type]
    return tuple(made)


def lie_alike(input: Tensor, *others: Tensor | None) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim(), torch.contiguous_format)
    dense = input.is_contiguous() or input.is_contiguous(memory_format=last)
    return dense and all(t is None or t.stride() == input.stride() for t in others)


def slope_times(activation: Activation, z: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return torch.autograd.grad(activation(leaf * 1.0), leaf, grad)[0]


def check_layout(channels_last: bool, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        layout = torch.contiguous_format
        if channels_last:
            layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        assert tensor.is_contiguous(memory_format=layout)


class Calls(list[str]):
    """The names of the ops that were called."""


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Let CPU tensors go where CUDA tensors do, and to these ops."""
    calls = Calls()

    def counted(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            calls.append(op.__name__)
            assert len(given) == len(arguments_of(op.__name__))
            return op(*given)

        return call

    for op in (group_norm_recorded, group_norm_backward_or_none):
        monkeypatch.setitem(dispatch._native, op.__name__, counted(op))
    monkeypatch.setattr(torch.ops.normswap, "group_norm", SimpleNamespace(default=counted(group_norm)), raising=False)
    module = sys.modules["normswap.ops.group_norm"]  # normswap.ops.group_norm is the function
    monkeypatch.setattr(module, "native_serves", lambda *tensors, **given: True)
    return calls
