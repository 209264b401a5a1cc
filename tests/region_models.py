"""Forwards with regions, each computed in one op: what is found in them, and that it is what it was."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from region_checks import CHANNELS, IMAGES, ROWS, Case
from torch import nn

# --- a sum before a norm --------------------------------------------------------------------------------------------


def sum_gates_its_norm(self, x, y):
    h = x + y
    return self.norm(h) * F.silu(h)


def sum_used_later(self, x, y):
    h = x + y
    return h + self.lin(self.norm(h))


def sum_used_by_nobody(self, x, y):
    return self.norm(x + y)


def sum_reversed(self, x, y):
    return self.norm(self.lin(y) + x)


def sum_by_function(self, x, y):
    h = torch.add(x, y)
    return h, self.rms(h)


def sum_by_method(self, x, y):
    h = x.add(y)
    return self.rms(h) + h


def sum_of_itself(self, x, y):
    h = x + x
    return h * self.norm(h)


def sum_aliased(self, x, y):
    x = x + y
    residual = x
    x = self.norm(x)
    return residual + self.lin(x)


def two_norms_of_a_sum(self, x, y):
    h = x + y
    a = self.norm(h)
    b = self.norm2(h)
    return h + self.lin(a) + b


def pre_norm_block(self, x, y):
    x = x + self.lin(self.norm(x))
    x = x + self.lin(self.norm2(x))
    return x


def sum_norm_act(self, x, y):
    return self.act(self.norm(self.lin(x) + y))


def shared_sum_norm_act(self, x, y):
    h: torch.Tensor
    h = x + y
    n = self.act(self.norm(h))
    return h - n


def dropped(self, x, y):
    h = self.drop(self.lin(x)) + y
    return self.norm(h)


def dropped_at_the_end(self, x, y):
    return self.drop(self.norm(x + y)), self.identity(self.norm2(y))


def drop_behind(self, x, y):
    n = self.norm(x + y)
    n = self.drop(n)
    return F.silu(n)


def broadcast(self, x, y):
    return self.norm(x + self.bias)


def broadcast_first(self, x, y):
    h = self.bias[None, None] + x
    return h + self.norm(h)


def other_dtype(self, x, y):
    h = x + y.double()
    return F.layer_norm(h, (CHANNELS,), self.weight.double(), None, 1e-5) + h


# --- activations ----------------------------------------------------------------------------------------------------


def f_relu(self, x, y):
    return F.relu(self.norm(x)) + y


def in_place_function(self, x, y):
    n = self.norm(x)
    torch.relu_(n)
    return n + y


def method_relu_in_place(self, x, y):
    return self.norm(x).relu_() * y


def gelu_tanh(self, x, y):
    return F.gelu(self.rms(x), approximate="tanh")


def leaky_literal(self, x, y):
    return F.leaky_relu(self.norm(x), 0.3)


def leaky_attribute(self, x, y):
    return F.leaky_relu(self.norm(x), self.slope)


def leaky_child(self, x, y):
    return self.leaky(self.norm(x))


def hardtanh(self, x, y):
    return F.hardtanh(self.norm(x), min_val=-0.5, max_val=0.7)


def hardtanh_default(self, x, y):
    return F.hardtanh(self.norm(x))


def relu6_at_its_bounds(self, x, y):
    return F.relu6(self.bare(x * 0)) + self.norm(x)


def clamp(self, x, y):
    return self.bare(x * 0).clamp(0, 1) + self.norm(x)


def swish(self, x, y):
    n = self.norm(x)
    return n * torch.sigmoid(n)


def swish_reversed(self, x, y):
    n = self.norm(x)
    return n.sigmoid() * n


def swish_in_steps(self, x, y):
    n = self.norm(x)
    gate = torch.sigmoid(n)
    return n * gate


# --- norms that are calls -------------------------------------------------------------------------------------------


def f_layer_norm(self, x, y):
    return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def one_vector_twice(self, x, y):
    return F.relu(F.layer_norm(x, (CHANNELS,), self.weight, self.weight)) + y


def f_layer_norm_keywords(self, x, y):
    return F.layer_norm(x, eps=1e-3, bias=self.bias, weight=None, normalized_shape=(CHANNELS,))


def f_rms_norm(self, x, y):
    h = x + y
    return h + F.rms_norm(h, (CHANNELS,), self.weight)


def f_group_norm(self, x, y):
    return F.silu(F.group_norm(x, 2, self.weight, self.bias))


# --- channels -------------------------------------------------------------------------------------------------------


def residual_behind(self, x, y):
    out = self.gn(self.conv(x))
    out += y
    return self.act_(out)


def residual_in_a_branch(self, x, y):
    out = self.act_(self.gn(x))
    out = self.gn2(self.conv(out))
    if self.se is not None:
        out = self.se(out)
    return F.relu(out + y)


def two_branches(self, x, y):
    return F.relu(self.gn(x) + self.gn2(y))


def instance_norm_leaky(self, x, y):
    return self.leaky(self.inorm(x))


def instance_norm_residual(self, x, y):
    return F.silu(y + self.inorm(x))


def batch_norm_residual(self, x, y):
    out = self.act_(self.bn(self.conv(x)))
    out = self.bn(out)
    out += y
    return F.relu(out)


def batch_norm_3d(self, x, y):
    return F.relu(self.bn3(x)) + y


def identity_between(self, x, y):
    return self.act_(self.identity(self.gn(x)))


def layer_norm_2d(self, x, y):
    return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def layer_norm_2d_in_steps(self, x, y):
    x = x.permute((0, 2, 3, 1))
    x = self.norm(x)
    x = x.permute(0, 3, 1, 2)
    return x * y


# --- adaptive norms -------------------------------------------------------------------------------------------------


def adaptive(self, x, y):
    shift, scale = y[:, :1], self.lin(y)[:, :1]
    return self.bare(x) * (1 + scale) + shift


def adaptive_unsqueezed(self, x, y):
    scale, shift = self.lin(y), y
    return self.bare(x) * (scale.unsqueeze(1) + 1.0) + shift.unsqueeze(1)


def adaptive_reversed(self, x, y):
    return y[:, None] + (1 + y[:, None]) * self.norm(x)


def adaptive_function(self, x, y):
    shift, scale = self.lin(y).neg(), self.lin(y)
    return self.lin(modulate(self.bare(x), shift, scale))


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


# --- where regions stand --------------------------------------------------------------------------------------------


def in_an_if(self, x, y):
    if x.sum() > -1e9:
        h = x + y
        return h + self.norm(h)
    return x


def in_a_loop(self, x, y):
    for _ in range(3):
        h = x + y
        x = self.norm(h)
        y = h * 0.5
    return x, y


def in_a_with(self, x, y):
    with torch.enable_grad():
        n = F.silu(self.norm(x))
    return n + y


def in_a_try(self, x, y):
    h = y
    try:
        h = x + y
        n = self.norm(h)
    finally:
        h = h * 2
    return h + n


def in_the_end_of_a_while(self, x, y):
    i = 0
    while i < 2:
        x = F.silu(self.norm(x))
        i += 1
    return x


def annotated(self, x: torch.Tensor, y: Any) -> torch.Tensor:
    h: torch.Tensor = self.norm(x)
    n: Any = F.relu(h)
    return n


def own_name_of_self(this, x, y):
    h = this.norm(x)
    if this.se is not None:
        h = this.se(h)
    return F.relu(h)


def noted(function):
    """A decorator as people write them."""
    calls = []

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


@noted
def decorated(self, x, y):
    h = x + y
    return h + self.norm(h)


@noted
@torch.no_grad()
def decorated_twice(self, x, y):
    h = x + y
    return h + self.norm(h)


def shapes_unpacked(self, x, y):
    h = x + y
    b, n, c = h.shape
    return self.norm(h).view(b * n, c), h


_VOLUME = (*IMAGES, 2)
_ROW, _IMAGE, _ADAPTED = (ROWS, ROWS), (IMAGES, IMAGES), (ROWS, (ROWS[0], CHANNELS))


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


FOUND: dict[str, Case] = {
    case.forward.__name__: case
    for case in (
        Case(sum_gates_its_norm, ("sum + norm",)),
        Case(sum_used_later, ("sum + norm",)),
        Case(sum_used_by_nobody, ("sum + norm",)),
        Case(sum_reversed, ("sum + norm",)),
        Case(sum_by_function, ("sum + rms",)),
        Case(sum_by_method, ("sum + rms",)),
        Case(sum_of_itself, ("sum + norm",)),
        Case(sum_aliased, ("sum + norm",)),
        Case(two_norms_of_a_sum, ("sum + norm",)),
        Case(pre_norm_block, ("sum + norm2",)),
        Case(sum_norm_act, ("sum + norm + act",)),
        Case(shared_sum_norm_act, ("sum + norm + act",)),
        Case(dropped, ("sum + norm",)),
        Case(dropped_at_the_end, ("sum + norm",)),
        Case(drop_behind, ("sum + norm + silu",)),
        Case(broadcast, ("sum + norm",)),
        Case(broadcast_first, ("sum + norm",)),
        Case(other_dtype, ("layer_norm",)),
        Case(f_relu, ("norm + relu",)),
        Case(in_place_function),
        Case(method_relu_in_place, ("norm + relu",)),
        Case(gelu_tanh, ("rms + gelu_tanh",)),
        Case(leaky_literal, ("norm + leaky_relu",)),
        Case(leaky_attribute),
        Case(leaky_child, ("norm + leaky",)),
        Case(hardtanh, ("norm + clamp",)),
        Case(hardtanh_default, ("norm + clamp",)),
        Case(relu6_at_its_bounds, ("bare + clamp",)),
        Case(clamp),
        Case(swish, ("norm + silu",), exact=False),
        Case(swish_reversed, ("norm + silu",), exact=False),
        Case(swish_in_steps),
        Case(f_layer_norm, ("layer_norm",)),
        Case(one_vector_twice, ("layer_norm + relu",)),
        Case(f_layer_norm_keywords, ("layer_norm",)),
        Case(f_rms_norm, ("rms_norm",)),
        Case(f_group_norm, ("group_norm + silu",), _IMAGE),
        Case(residual_behind, ("gn + residual + act_",), _IMAGE),
        Case(residual_in_a_branch, ("gn + act_", "gn2 + residual + relu"), _IMAGE),
        Case(two_branches, ("gn + residual + relu",), _IMAGE),
        Case(instance_norm_leaky, ("inorm + leaky",), _IMAGE),
        Case(instance_norm_residual, ("inorm + residual + silu",), _IMAGE),
        Case(batch_norm_residual, ("conv + bn + act_", "bn + residual + relu"), _IMAGE, modes=("eval",)),
        Case(batch_norm_3d, ("bn3 + relu",), (_VOLUME, _VOLUME)),
        Case(identity_between, ("gn + act_",), _IMAGE),
        Case(layer_norm_2d, ("norm",), _IMAGE),
        Case(layer_norm_2d_in_steps, ("norm",), _IMAGE),
        Case(adaptive, ("bare + scale + shift",)),
        Case(adaptive_unsqueezed, ("bare + scale + shift",), _ADAPTED),
        Case(adaptive_reversed, ("norm + scale + shift",), _ADAPTED),
        Case(adaptive_function, ("bare + scale + shift",), _ADAPTED),
        Case(in_an_if, ("sum + norm",)),
        Case(in_a_loop, ("sum + norm",)),
        Case(in_a_with, ("norm + silu",)),
        Case(in_a_try),
        Case(in_the_end_of_a_while, ("norm + silu",)),
        Case(annotated, ("norm + relu",)),
        Case(own_name_of_self, ("norm + relu",)),
        Case(decorated, ("sum + norm",)),
        Case(decorated_twice, ("sum + norm",)),
        Case(shapes_unpacked, ("sum + norm",)),
    )
}
"""By the name of the forward. No second norm of one sum is taken in: the first has it."""
