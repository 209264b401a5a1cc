"""Wrong kernels on purpose: each op of ours, gone wrong in a known way at the sites that are marked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from long_way import go_the_long_way
from models import L1, Projection, randomised
from torch import Tensor, nn

from normswap import ops

KINDS = ("layer_norm", "group_norm", "rms_norm", "l1_norm", "linear_scale_batch_norm")
WIDTH = 24

_MARK = 2e-5  # the eps of a marked site; a marked L1 norm is the one along dim -1
_WRONG_EPS = 1e-3
_OPS = {kind: kind for kind in KINDS} | {
    "linear_scale_batch_norm": "scale_batch_norm",
}


class LastL1(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=-1, keepdim=True)


class Parallel(nn.Module):
    """Sites of one kind side by side, so that each of them sees the input itself; those in ``marked`` go wrong."""

    def __init__(self, kind: str, count: int, marked: set[int]) -> None:
        super().__init__()
        self.sites = nn.ModuleList(_site(kind, i in marked) for i in range(count))
        randomised(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([site(x) for site in self.sites]).sum(0)


def _site(kind: str, marked: bool) -> nn.Module:
    eps = _MARK if marked else 1e-5
    if kind == "layer_norm":
        return nn.LayerNorm(WIDTH, eps=eps)
    if kind == "group_norm":
        return nn.GroupNorm(2, WIDTH, eps=eps)
    if kind == "rms_norm":
        return nn.RMSNorm(WIDTH, eps=eps)
    if kind == "l1_norm":
        return LastL1() if marked else L1()
    site = Projection(WIDTH, WIDTH)
    site.bn.eps = eps
    return site


class _Call:
    """The arguments of one call of an op by name, the same for every op."""

    def __init__(self, kind: str, args: tuple[Any, ...], rest: dict[str, Any]) -> None:
        self.kind, self.args, self.rest = kind, list(args), rest
        mark = -1 if kind == "l1_norm" else _MARK
        self.marked = any(type(one) is type(mark) and one == mark for one in args)

    def replaced(self, old: Any, new: Any) -> tuple[Any, ...]:
        return tuple(new if one is old or (isinstance(one, float) and one == old) else one for one in self.args)


def forgets_bias(right: Callable[..., Tensor], call: _Call) -> Tensor:
    bias = call.args[5] if call.kind == "linear_scale_batch_norm" else call.args[3]
    return right(*call.replaced(bias, None), **call.rest)


def other_eps(right: Callable[..., Tensor], call: _Call) -> Tensor:
    if call.kind == "l1_norm":
        x = call.args[0]
        return right(*call.args, **call.rest) * 0 + x / (x.abs().mean(call.args[1], keepdim=True) + _WRONG_EPS)
    return right(*call.replaced(_MARK, _WRONG_EPS), **call.rest)


def leaves_three_columns(right: Callable[..., Tensor], call: _Call) -> Tensor:
    written = torch.ones(WIDTH, device=call.args[0].device)
    written[-3:] = 0
    return right(*call.args, **call.rest) * written.to(call.args[0].dtype)


def one_pass_variance(right: Callable[..., Tensor], call: _Call) -> Tensor:
    """E[x^2] - E[x]^2 in float32; the op runs too, for its buffers."""
    out, x = right(*call.args, **call.rest), call.args[0].float()
    place = 4 if call.kind == "linear_scale_batch_norm" else 2
    weight, bias = (v.view(-1, *(1,) * (x.dim() - 2)) for v in call.args[place : place + 2])
    if call.kind == "linear_scale_batch_norm":
        shift = call.rest.get("input_bias")
        x = (x if shift is None else x + shift) * call.args[1]
        rows, dim = x, 0
    elif call.kind == "group_norm":
        rows, dim = x.reshape(len(x), call.args[1], -1), -1
    else:
        rows, dim, weight, bias = x, -1, call.args[2], call.args[3]
    mean = rows.mean(dim, keepdim=True)
    variance = rows.square().mean(dim, keepdim=True) - mean.square()
    normalised = ((rows - mean) * (variance + _MARK).rsqrt()).reshape(x.shape)
    return (normalised * weight + bias).to(out.dtype)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.01 * grad


def gradient_off(right: Callable[..., Tensor], call: _Call) -> Tensor:
    """The gradient of the weight, or of the input where there is no weight."""
    place = {"l1_norm": 0, "linear_scale_batch_norm": 4}.get(call.kind, 2)
    return right(*call.args[:place], _Scaled.apply(call.args[place]), *call.args[place + 1 :], **call.rest)


_CENTRED = ("layer_norm", "group_norm", "linear_scale_batch_norm")
FAULTS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "forgets bias": (forgets_bias, _CENTRED),
    "eps 1e-3": (other_eps, KINDS),
    "leaves the last 3 columns": (leaves_three_columns, KINDS),
    "one-pass variance": (one_pass_variance, _CENTRED),
    "a gradient 1% off": (gradient_off, KINDS),
}
"""Every fault, and the kinds that can have it: the others have no bias, or no variance."""


def plant(patch: pytest.MonkeyPatch, fault: str, kind: str) -> None:
    """Give the op of ``kind`` the fault, at marked sites only."""
    go_the_long_way(patch)
    right = getattr(ops, _OPS[kind])

    def op(*args: Any, **rest: Any) -> Tensor:
        call = _Call(kind, args, rest)
        return FAULTS[fault][0](right, call) if call.marked else right(*args, **rest)

    patch.setattr(ops, _OPS[kind], op)


def example(fault: str, kind: str, model: Parallel) -> Tensor:
    """An input for ``model``; for the one-pass variance what is normalised has a mean of 1000. A model without
    parameters is differentiated where its input asks for that."""
    x = torch.randn(20, WIDTH, requires_grad=kind == "l1_norm")
    if fault == "one-pass variance":
        if kind != "linear_scale_batch_norm":
            return x + 1000
        with torch.no_grad():
            for site in model.sites:
                site.scale.fill_(1.5)
                site.gemm.bias.fill_(1000.0)
    return x
