"""Forwards that hold an expression - swapped, look-alikes, and traps that trace cleanly - and how a model is made of
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CHANNELS = 6, 5
EPS = 0.25
CALLS: list[int] = []


# --- how a model is put together ----------------------------------------------------------------------------------


class Written(nn.Module):
    """A module of one forward, given as a function; everything that some forward here reads."""

    dim = 1

    def __init__(self, scale: Any = (CHANNELS,), width: int = CHANNELS, **bn: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, width)
        self.bn = nn.BatchNorm1d(width, **bn)
        if isinstance(scale, tuple):
            self.scale = nn.Parameter(torch.empty(scale))
        elif isinstance(scale, Tensor):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale
        self.eps, self.calls, self.config = 0.25, 0, {"eps": 0.25}


def written(forward: Callable[..., Any], *args: Any, bare: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """Makes modules with that forward; ``bare`` ones have no children."""
    cls = type("Written", (Written,), {"forward": forward})

    def make() -> nn.Module:
        module = cls(*args, **options)
        if bare:
            del module.gemm, module.bn, module.scale
        return module

    return make


def l1(forward: Callable[..., Any], dim: int = 1) -> Callable[[], nn.Module]:
    make = written(forward, bare=True)

    def made() -> nn.Module:
        module = make()
        module.dim = dim
        return module

    return made


def block(self, x):
    return self.bn(self.gemm(x) * self.scale)


def plain_l1(self, x):
    return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


def eps_l1(self, x):
    return x / (x.abs().mean(dim=self.dim, keepdim=True) + self.eps)


def changed(change: Callable[[Any], Any], **options: Any) -> Callable[[], nn.Module]:
    """The block after ``change``, before the swap."""

    def make() -> nn.Module:
        module = written(block, **options)()
        change(module)
        return module

    return make


class Scale(nn.Module):
    def __init__(self, scale: Any = None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(CHANNELS)) if scale is None else scale

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


# --- look-alikes --------------------------------------------------------------------------------------------------


def linear_twice(self, x):
    return self.bn(self.gemm(x) * self.scale + self.gemm(x))


def linear_in_both(self, x):
    return self.bn(self.gemm(x) * self.gemm(x))


def output_elsewhere(self, x):
    y = self.gemm(x)
    return self.bn(y * self.scale) + y


def two_batch_norms(self, x):
    y = self.gemm(x)
    return self.bn(y * self.scale) + self.bn(y)


def in_place_l1(self, x):
    x /= x.abs().mean(1, keepdim=True)
    return x


def alias_l1(self, x):
    y = x.view_as(x)
    y.mul_(2)
    return x / x.abs().mean(1, keepdim=True)


def abs_in_place(self, x):
    return x / x.abs_().mean(1, keepdim=True)


def in_place_scale(self, x):
    y = self.gemm(x)
    y *= self.scale
    return self.bn(y)


def mul_in_place(self, x):
    return self.bn(self.gemm(x).mul_(self.scale))


def scale_first(self, x):
    return self.bn(self.scale * self.gemm(x))


def scale_behind(self, x):
    return self.bn(self.gemm(x)) * self.scale


def scale_twice(self, x):
    return self.scale * self.bn(self.gemm(x) * self.scale)


def literal(self, x):
    return self.bn(self.gemm(x) * -0.75)


def no_scale(self, x):
    return self.bn(self.gemm(x))


def no_abs(self, x):
    return x / x.mean(1, keepdim=True)


def two_dims(self, x):
    return x / x.abs().mean((0, 1), keepdim=True)


def no_keepdim(self, x):
    return x / x.abs().mean(1)


def another_tensor(self, x):
    return x / torch.tanh(x).abs().mean(1, keepdim=True)


def sum_not_mean(self, x):
    return x / x.abs().sum(1, keepdim=True)


def eps_everywhere(self, x):
    return x / (x.abs() + 0.5).mean(1, keepdim=True)


def eps_behind_bn(self, x):
    return self.bn(self.gemm(x) * self.scale + 0.5)


def on_data(self, x):
    return x / x.abs().mean(1, keepdim=True) if x.sum() > 0 else x


def while_loop(self, x):
    while x.abs().max() > 1:
        x = x / (x.abs().mean(1, keepdim=True) + 1)
    return x


def counting(self, x):
    self.calls += 1
    return self.bn(self.gemm(x) * self.scale)


def appending(self, x):
    CALLS.append(1)
    return x / x.abs().mean(1, keepdim=True)


def training_branch(self, x):
    return x / x.abs().mean(1, keepdim=True) if self.training else x


def training_flag(self, x):
    return self.bn(self.gemm(x) * (self.scale if self.training else 1.0))


def variadic(self, *args):
    return args[0] / args[0].abs().mean(1, keepdim=True)


def keyword_only(self, x, *, dim=1):
    return x / x.abs().mean(dim, keepdim=True)


def defaulted(self, x, mask=None):
    return self.bn(self.gemm(x) * self.scale)


# --- traps that trace cleanly ---------------------------------------------------------------------------------------


def no_grad_block(self, x):
    with torch.no_grad():
        size = x.abs().mean(1, keepdim=True)
    return x / size


def no_grad_linear(self, x):
    with torch.no_grad():
        y = self.gemm(x)
    return self.bn(y * self.scale)


@torch.no_grad()
def no_grad_decorator(self, x):
    return x / x.abs().mean(1, keepdim=True)


def detached(self, x):
    return x / x.detach().abs().mean(1, keepdim=True)


def autocast_block(self, x):
    with torch.autocast(x.device.type, enabled=False):
        return self.bn(self.gemm(x) * self.scale)


def grad_query(self, x):
    return x / (x.abs().mean(1, keepdim=True) + (0.5 if torch.is_grad_enabled() else 0.0))


def of_global(self, x):
    return x / (x.abs().mean(1, keepdim=True) + EPS)


def of_config(self, x):
    return x / (x.abs().mean(1, keepdim=True) + self.config["eps"])


def isinstance_query(self, x):
    if isinstance(x, Tensor):
        return x / x.abs().mean(1, keepdim=True)
    return x


def shape_after_in_place(self, x):
    y = x.clone()
    y.unsqueeze_(0)
    return x / x.abs().mean(y.dim() - 2, keepdim=True)


def only_the_size(self, x):
    return 1.0 / x.abs().mean(1, keepdim=True)


def gated(self, x):
    return F.silu(x) * (x / x.abs().mean(1, keepdim=True))
