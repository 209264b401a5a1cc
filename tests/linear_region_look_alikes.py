"""Forwards that only look as if they held Linear -> scale -> BatchNorm, or hold children that cannot join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from linear_region_changes import normed, quantized, wrapped
from linear_region_models import ACT, BATCH, FEATURES, WIDTH, among_statements, case
from region_checks import Case, hook


def by_a_row_of_the_input(self, x, y):
    return F.relu(self.bn(self.fc(x) * y[:1]))


def by_another_linear(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.fc2(x)))


def by_a_value_a_sample(self, x, y):
    return F.relu(self.bn(self.fc(x) * y))


def output_used_elsewhere(self, x, y):
    h = self.fc(x)
    return F.relu(self.bn(h * self.scale)) + h


def product_used_elsewhere(self, x, y):
    h = self.fc(x) * self.scale
    return F.relu(self.bn(h)) + h


def squared(self, x, y):
    h = self.fc(x)
    return F.relu(self.bn(h * h))


def divided(self, x, y):
    return F.relu(self.bn(self.fc(x) / self.scale))


def shifted(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale + 1))


def scaled_twice(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale * 2))


def scaled_in_place(self, x, y):
    h = self.fc(x)
    h *= self.scale
    return F.relu(self.bn(h))


def scaled_by_a_method_in_place(self, x, y):
    return F.relu(self.bn(self.fc(x).mul_(self.scale)))


def scale_changed_between(self, x, y):
    h = self.fc(x)
    self.scale.data.mul_(1.5)
    return F.relu(self.bn(h * self.scale))


def input_changed_between(self, x, y):
    h = self.fc(x)
    x.add_(1)
    return F.relu(self.bn(h * self.scale)) * x.sum()


def without_gradients_of_the_linear(self, x, y):
    with torch.no_grad():
        h = self.fc(x)
    return F.relu(self.bn(h * self.scale))


def captured(self, x, y):
    h = self.fc(x)
    later = lambda: h  # noqa: E731
    return F.relu(self.bn(h)) + later()


def in_a_branch_of_a_tensor(self, x, y):
    h = self.fc(x)
    if bool(x.sum() > 0):
        h = h * self.scale
    return F.relu(self.bn(h))


def norm_first(self, x, y):
    return self.bn(y) + self.fc(x)


def norm_called_between(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    other = self.bn(y)
    return F.relu(h) + other


def statistics_read_between(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    mean = self.bn.running_mean + 1
    return F.relu(h) + mean


def another_norm(self, x, y):
    return F.relu(self.ln(self.fc(x) * self.scale)) + y


def viewed(self, x, y):
    return F.relu(self.bn(self.fc(x).view(-1, WIDTH) * self.scale))


_NORM = ("bn + relu",)
_UNLIKE: dict[Callable[..., Any], tuple[str, ...]] = {
    by_a_row_of_the_input: _NORM,
    by_another_linear: _NORM,
    by_a_value_a_sample: _NORM,
    output_used_elsewhere: _NORM,
    product_used_elsewhere: _NORM,
    squared: _NORM,
    divided: _NORM,
    shifted: _NORM,
    scaled_twice: _NORM,
    scaled_in_place: _NORM,
    scaled_by_a_method_in_place: _NORM,
    scale_changed_between: _NORM,
    input_changed_between: _NORM,
    without_gradients_of_the_linear: _NORM,
    captured: _NORM,
    in_a_branch_of_a_tensor: _NORM,
    norm_first: ("bn + residual",),
    norm_called_between: (),
    statistics_read_between: (),
    another_norm: ("ln + relu",),
    viewed: _NORM,
}

LOOK_ALIKES: dict[str, Case] = {
    **{forward.__name__: case(forward, found) for forward, found in _UNLIKE.items()},
    "hooked before": case(among_statements, _NORM, change=hook("fc")),
    "norm hooked before": case(among_statements, (), change=hook("bn")),
    "wrapped before": case(among_statements, _NORM, change=wrapped),
    "quantized before": case(among_statements, _NORM, change=quantized, modes=("eval",)),
    "weight_norm before": case(among_statements, _NORM, change=normed),
    "three dims": case(among_statements, ACT, shapes=((BATCH, WIDTH, FEATURES), (BATCH, WIDTH, WIDTH))),
    "one row": case(among_statements, ACT, shapes=((1, FEATURES), (1, WIDTH))),
    "no rows": case(among_statements, ACT, shapes=((0, FEATURES), (0, WIDTH))),
    "few rows": case(among_statements, ACT, shapes=((4, FEATURES), (4, WIDTH))),
    "a bad width": case(among_statements, ACT, shapes=((BATCH, FEATURES + 1), (BATCH, WIDTH))),
}
