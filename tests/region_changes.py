"""What may happen to a module with a region in its forward, before the swap or after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from region_checks import CHANNELS, IMAGES, ROWS, Case, hook, overlaid, pre_hook, put
from region_models import (
    batch_norm_residual,
    f_layer_norm,
    f_relu,
    leaky_child,
    residual_in_a_branch,
    sum_norm_act,
    sum_used_later,
)
from torch import nn
from torch.nn.utils import parametrize

_IMAGE = (IMAGES, IMAGES)


def one_value_in_a_branch(self, x, y):
    if self.flag:
        y = x
    return y / x.norm()


def one_dim_in_a_branch(self, x, y):
    along = -1
    if self.se is not None:
        along = 1
    c = x - x.mean(-1, keepdim=True)
    return c / torch.sqrt(c.square().mean(along, keepdim=True) + 1e-5) + y


def one_eps_in_a_branch(self, x, y):
    eps = 0.5
    if self.flag:
        eps = 1e-5
    return F.silu(F.layer_norm(x, (CHANNELS,), self.weight, self.bias, eps))


def one_weight_in_a_branch(self, x, y):
    weight = self.weight
    if self.flag:
        weight = self.bias
    return F.silu(F.layer_norm(x, (CHANNELS,), weight, self.bias))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def sum_of_two_dtypes(self, x, y):
    return F.gelu(self.norm(x.bfloat16() + y))


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.norm, "weight", Doubled())


def without_bias(self: Any, name: str) -> Any:
    return None if name == "bias" else nn.Module.__getattr__(self, name)


def without_weights(model: Any) -> None:
    model.norm.weight = model.norm.bias = None


class Counted(nn.Module):
    """An RMSNorm written by hand that does more where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) * self.calls

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


_SUM, _ACT, _LEAKY = ("sum + norm",), ("norm + relu",), ("norm + leaky",)
_RES = ("gn + act_", "gn2 + residual + relu")
CHANGED: dict[str, Case] = {
    "hook_before": Case(sum_used_later, _SUM, change=hook("norm")),
    "hook_later": Case(sum_used_later, _SUM, later=hook("norm")),
    "pre_hook_later": Case(f_relu, _ACT, later=pre_hook("norm")),
    "hook_on_activation": Case(leaky_child, _LEAKY, later=hook("leaky")),
    "hook_on_dropout": Case(sum_norm_act, ("sum + norm + act",), later=hook("act")),
    "parametrized_before": Case(f_relu, (), change=parametrized),
    "parametrized_later": Case(f_relu, _ACT, later=parametrized),
    "norm_with_a_call_of_its_own": Case(f_relu, change=put("norm", Counted)),
    "norm_replaced": Case(f_relu, _ACT, later=put("norm", lambda: nn.LayerNorm(CHANNELS, eps=0.5))),
    "norm_of_another_kind": Case(f_relu, _ACT, later=put("norm", lambda: nn.RMSNorm(CHANNELS))),
    "norm_is_a_function": Case(f_relu, _ACT, later=put("norm", lambda: nn.Identity())),
    "eps_changed": Case(f_relu, _ACT, later=put("norm.eps", lambda: 0.5)),
    "weights_none": Case(f_relu, _ACT, later=without_weights),
    "frozen": Case(sum_used_later, _SUM, later=lambda model: model.norm.requires_grad_(False)),
    "slope_changed": Case(leaky_child, _LEAKY, later=put("leaky.negative_slope", lambda: 0.7)),
    "activation_replaced": Case(leaky_child, _LEAKY, later=put("leaky", nn.Softplus)),
    "forward_of_the_norm": Case(f_relu, _ACT, later=put("norm.forward", lambda: torch.neg)),
    "branch_taken_later": Case(residual_in_a_branch, _RES, _IMAGE, later=put("se", lambda: nn.Conv2d(8, 8, 1))),
    "another_value_later": Case(one_value_in_a_branch, ("frobenius_norm",), later=put("flag", lambda: False)),
    "another_dim_later": Case(one_dim_in_a_branch, ("layer_norm_by_hand",), later=put("se", lambda: torch.neg)),
    "another_eps_later": Case(one_eps_in_a_branch, ("layer_norm + silu",), later=put("flag", lambda: False)),
    "another_weight_later": Case(one_weight_in_a_branch, ("layer_norm + silu",), later=put("flag", lambda: False)),
    "class_over_a_norm": Case(f_relu, _ACT, later=overlaid("norm")),
    "forward_over_a_norm": Case(f_relu, _ACT, later=overlaid("norm", forward=lambda self, x: x * 3)),
    "two_dtypes_of_other_shapes": Case(sum_of_two_dtypes, ("sum + norm + gelu",), ((2, 3, CHANNELS), (4, 3, CHANNELS))),
    "weight_over_a_norm": Case(
        f_relu, _ACT, later=overlaid("norm", weight=property(lambda self: torch.ones(CHANNELS)))
    ),
    "getattr_over_a_norm": Case(f_relu, _ACT, later=overlaid("norm", __getattr__=without_bias)),
    "call_over_a_norm": Case(f_relu, _ACT, later=overlaid("norm", __call__=lambda self, x: x * 3)),
    "weight_replaced": Case(f_layer_norm, ("layer_norm",), later=put("bias", lambda: None)),
    "double": Case(f_relu, _ACT, later=lambda model: model.double()),
    "batch_norm_in_train": Case(
        batch_norm_residual,
        ("conv + bn + act_", "bn + residual + relu"),
        _IMAGE,
        later=lambda m: m.train(),
        modes=("eval",),
    ),
    "empty_batch": Case(sum_used_later, _SUM, ((0, *ROWS[1:]), (0, *ROWS[1:]))),
    "broadcast_rows": Case(sum_used_later, _SUM, (ROWS, (1, CHANNELS))),
    "broadcast_first": Case(sum_used_later, _SUM, ((1, CHANNELS), ROWS)),
    "bad_shape": Case(sum_used_later, _SUM, ((2, CHANNELS + 1), (2, CHANNELS + 1))),
}
