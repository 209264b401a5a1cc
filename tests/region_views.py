"""Forwards that normalise a sum in another shape (as Swin's blocks do), and such as only look like it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from region_checks import CHANNELS, ROWS, Case

WINDOWS = (2, 3, 5, CHANNELS)


def window_block(self, x, y):
    b, h, w, c = x.shape
    x = x + self.drop(self.lin(self.norm2(x)))
    x = x.reshape(b, -1, c)
    x = x + self.lin(self.norm(x))
    return x.reshape(b, h, w, c)


def viewed_by_nobody_else(self, x, y):
    return self.act(self.norm((x + y).view(-1, CHANNELS)))


def viewed_in_a_tuple(self, x, y):
    h = (x + y).view((-1, x.shape[-1]))
    return h, self.rms(h)


def viewed_as_another(self, x, y):
    h = torch.add(x, y).reshape(x.shape)
    return h * self.norm(h)


def rows_mixed(self, x, y):
    """Whatever the rows are: both summands are looked at alike."""
    h = (x + y).reshape(-1, CHANNELS, x.shape[1])
    h = h.transpose(1, 2).contiguous()
    s = (h + h).reshape(x.shape[1], -1, CHANNELS)
    return s - self.norm(s)


# --- look-alikes ----------------------------------------------------------------------------------------------------


def sum_used_too(self, x, y):
    h = x + y
    v = h.reshape(-1, CHANNELS)
    return self.norm(v), v, h


def viewed_as_another_dtype(self, x, y):
    return self.norm((x + y).view(torch.int32).view(torch.float32))


def viewed_twice(self, x, y):
    h = (x + y).view(-1).view(-1, CHANNELS)
    return self.norm(h), h


def changed_between(self, x, y):
    h = x + y
    y.mul_(2)
    h = h.reshape(-1, CHANNELS)
    return h + self.norm(h)


def sizes_with_an_effect(self, x, y):
    h = x + y
    h = h.reshape(*[x.mul_(1).shape[0], -1, CHANNELS])
    return h + self.norm(h)


def adapted(self, x, y):
    return self.norm((x + y).reshape(x.shape)) * (1 + y[:, :1, :1]) + y[:, :1, :1]


def transposed(self, x, y):
    x, y = x.transpose(1, 2), y.transpose(1, 2)
    h = (x + y).reshape(x.shape[0], -1, CHANNELS)
    return h + self.norm(h)


def one_transposed(self, x, y):
    h = (x.transpose(1, 2).reshape(x.shape) + y).reshape(-1, CHANNELS)
    n = self.norm(h)
    k = (x.permute(0, 2, 1, 3) + self.bias).reshape(-1, CHANNELS)
    return h + n, k + self.norm2(k)


def shape_of_the_other(self, x, y):
    """The sum has the shape of the second operand: a view of the first alone would be another."""
    h = (self.bias + y).reshape(-1, CHANNELS)
    return h + self.norm(h)


def function_of_the_sum(self, x, y):
    h = F.relu(x + y).reshape(-1, CHANNELS)
    return h + self.norm(h)


_WINDOWS: Any = (WINDOWS, WINDOWS)
VIEWS: dict[str, Case] = {
    case.forward.__name__: case
    for case in (
        Case(window_block, ("sum + norm",), _WINDOWS),
        Case(viewed_by_nobody_else, ("sum + norm + act",), _WINDOWS),
        Case(viewed_in_a_tuple, ("sum + rms",), _WINDOWS),
        Case(viewed_as_another, ("sum + norm",), _WINDOWS),
        Case(rows_mixed, ("sum + norm",), ((4, 3, 6, CHANNELS), (4, 3, 6, CHANNELS))),
        Case(sum_used_too, (), _WINDOWS),
        Case(viewed_as_another_dtype, (), _WINDOWS),
        Case(viewed_twice, (), _WINDOWS),
        Case(changed_between, (), _WINDOWS),
        Case(sizes_with_an_effect, (), _WINDOWS),
        Case(adapted, ("norm + scale + shift",), _WINDOWS),
        Case(transposed, ("sum + norm",), _WINDOWS),
        Case(one_transposed, ("sum + norm", "sum + norm2"), _WINDOWS),
        Case(shape_of_the_other, ("sum + norm",), (ROWS, ROWS)),
        Case(function_of_the_sum, (), _WINDOWS),
    )
}
"""By the name of the forward. A view that is not of both summands is left to the region's own statements."""
