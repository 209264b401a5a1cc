"""Forwards with Linear -> scale -> BatchNorm among other statements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from region_checks import Case
from torch import nn

FEATURES, WIDTH, BATCH = 6, 5, 9


class Factor(nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class LinearParts(nn.Module):
    """All that some forward here calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH, bias=False)
        self.bn, self.bn2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.scale, self.one = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))
        self.register_buffer("row", torch.ones(1, WIDTH))
        self.number, self.flag, self.times, self.factor = 0.75, True, 2, Factor()
        self.act, self.act_, self.drop, self.ln = nn.GELU(), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.LayerNorm(WIDTH)
        self.extra: Any = None

    def project(self, x):
        return F.relu(self.bn(self.fc(x) * self.scale))


def among_statements(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return F.relu(h) + y


def without_an_activation(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return h * y


def without_a_scale(self, x, y):
    return torch.tanh(self.bn(self.fc(x))) * y


def scale_first(self, x, y):
    return self.act(self.bn(self.scale * self.fc(x))) - y


def by_a_method(self, x, y):
    return F.silu(self.bn(self.fc(x).mul(self.scale))) - y


def by_a_function(self, x, y):
    return F.leaky_relu(self.bn(torch.mul(self.scale, self.fc(x))), 0.3) - y


def by_a_literal(self, x, y):
    return self.bn(self.fc(x) * 2.0) - y


def by_a_number(self, x, y):
    return F.relu(self.bn2(self.number * self.fc2(x))) - y


def by_a_buffer(self, x, y):
    return F.relu(self.bn2(self.fc2(x) * self.row)) - y


def by_one_parameter(self, x, y):
    return F.relu(self.bn(self.fc2(x) * self.one)) - y


def by_a_sum(self, x, y):
    return F.hardswish(self.bn(self.fc(x) * (1 + self.scale))) - y


def by_a_row_of_it(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale[None])) + y


def by_a_child(self, x, y):
    return F.relu(self.bn(self.factor(self.fc(x)))) + y


def with_a_residual(self, x, y):
    h = self.fc(x)
    h = self.bn(h * self.scale)
    h += y
    return self.act_(h)


def with_a_residual_alone(self, x, y):
    return self.bn(self.fc(x) * self.scale) + y


def with_a_residual_first(self, x, y):
    return torch.sigmoid(y * 2 + self.bn(self.fc(x)))


def with_a_residual_that_broadcasts(self, x, y):
    return F.relu(self.bn(self.fc(x)) + y[:1])


def with_a_vector_added(self, x, y):
    return F.relu(self.bn(self.fc(x)) + self.scale) + y


def with_a_number_added(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale) + self.number) + y


def with_two_of_them(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale)) + F.silu(self.bn2(self.fc2(x))) + y


def with_a_dropout(self, x, y):
    return F.relu(self.drop(self.bn(self.fc(x)))) + y


def result_used_twice(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return F.relu(h) + h


def linear_called_by_name(self, x, y):
    return F.relu(self.bn(self.fc(input=x))) + y


def two_arguments(self, x, y):
    return F.relu(self.bn(torch.mul(self.fc(x), other=self.scale)))


def scaled_behind(self, x, y):
    return F.relu(self.bn(self.fc(x)) * self.scale) + y


def scaled_on_both_sides(self, x, y):
    h = self.number * self.bn(self.fc(x) * self.scale)
    return h - y


def called_by_name(self, x, y):
    return F.relu(self.bn(input=self.fc(x) * self.scale)) + y


def in_an_if(self, x, y):
    if self.extra is not None:
        y = self.extra(y)
    h = self.bn(self.fc(x) * self.scale)
    if self.flag:
        h = F.relu(h)
    return h + y


def in_a_loop(self, x, y):
    for _ in range(self.times):
        h = self.bn(self.fc(x) * self.scale)
        y = y + F.relu(h)
    return y


def in_a_with(self, x, y):
    with contextlib.nullcontext():
        h = F.relu(self.bn(self.fc(x) * self.scale))
    return h + y


def under_autocast(self, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        h = F.relu(self.bn(self.fc(x)))
    return h.float() + y


def without_gradients(self, x, y):
    with torch.no_grad():
        h = F.relu(self.bn(self.fc(x) * self.scale))
    return h + y


def same_linear_twice(self, x, y):
    return self.bn(self.fc(x) * self.scale) * self.bn2(self.fc(x + 1))


ACT, _SHAPES = ("fc + scale + bn + relu",), ((BATCH, FEATURES), (BATCH, WIDTH))
_SIGNED = {
    among_statements: ACT,
    without_an_activation: ("fc + scale + bn",),
    without_a_scale: ("fc + bn + tanh",),
    scale_first: ("fc + scale + bn + act",),
    by_a_method: ("fc + scale + bn + silu",),
    by_a_function: ("fc + scale + bn + leaky_relu",),
    by_a_literal: ("fc + scale + bn",),
    by_a_number: ("fc2 + scale + bn2 + relu",),
    by_a_buffer: ("fc2 + scale + bn2 + relu",),
    by_one_parameter: ("fc2 + scale + bn + relu",),
    by_a_sum: ("fc + scale + bn + hardswish",),
    by_a_row_of_it: ACT,
    by_a_child: ("fc + factor + bn + relu",),
    with_a_residual: ("fc + scale + bn + residual + act_",),
    with_a_residual_alone: ("fc + scale + bn + residual",),
    with_a_residual_first: ("fc + bn + residual + sigmoid",),
    with_a_residual_that_broadcasts: ("fc + bn + residual + relu",),
    with_a_vector_added: ("fc + bn",),
    with_a_number_added: ("fc + scale + bn",),
    with_two_of_them: ("fc + scale + bn + relu", "fc2 + bn2 + silu"),
    with_a_dropout: ("fc + bn + relu",),
    result_used_twice: ("fc + scale + bn",),
    called_by_name: ACT,
    linear_called_by_name: ("fc + bn + relu",),
    two_arguments: ACT,
    scaled_behind: ("fc + bn + scale",),
    scaled_on_both_sides: ("fc + scale + bn + scale",),
    in_an_if: ACT,
    in_a_loop: ("fc + scale + bn",),  # what a body binds may be read behind it
    in_a_with: ACT,
    under_autocast: ("fc + bn + relu",),
    without_gradients: ACT,
    same_linear_twice: ("fc + scale + bn", "fc + bn2"),
}


def case(forward: Callable[..., Any], found: tuple[str, ...], **options: Any) -> Case:
    return Case(forward, found, **{"shapes": _SHAPES, "exact": False, "base": LinearParts, **options})


FOUND: dict[str, Case] = {forward.__name__: case(forward, found) for forward, found in _SIGNED.items()}
