"""Forwards that look as if they held a region and must not be rewritten so."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from region_checks import CHANNELS, IMAGES, ROWS, Case, put

_IMAGE = (IMAGES, IMAGES)


def difference(self, x, y):
    return self.norm(x - y)


def add_alpha(self, x, y):
    return self.norm(torch.add(x, y, alpha=2))


def add_in_place(self, x, y):
    x += y
    return self.norm(x)


def add_to_a_view(self, x, y):
    h = x + y
    h[:, 0] += 1
    return self.norm(h) + h


def changed_between(self, x, y):
    h = x + y
    x.mul_(2)
    return self.norm(h)


def operand_changed_by_a_child(self, x, y):
    h = x + y
    z = self.act_(x)
    return self.norm(h) + z


def norm_input_changed_by_a_child(self, x, y):
    n = self.norm(x)
    z = self.act_(x)
    return F.silu(n) + z


def random_numbers_between(self, x, y):
    n = self.gn(x)
    n = self.drop(n)
    z = self.drop(y)
    return F.silu(n) + z


def norm_used_twice(self, x, y):
    n = self.norm(x)
    return F.relu(n) + n


def alias_changed(self, x, y):
    n = self.gn(x)
    m = n
    n += y
    return self.act_(n) + m


def captured_by_a_lambda(self, x, y):
    h = self.norm(x)
    read = lambda: h  # noqa: E731
    h = F.relu(h)
    return read() + h


def captured_annotated(self, x, y):
    read = lambda: h  # noqa: E731
    h: Any = self.norm(x)
    n = F.relu(h)
    return read() + n


def captured_under_another_name(self, x, y):
    read = lambda: m  # noqa: E731
    n = self.norm(x)
    m = n
    n = F.relu(n)
    return read() + n


def kept_in_a_global(self, x, y):
    global kept
    n = self.norm(x)
    kept = n
    n = F.relu(n)
    return globals()["kept"] + n


def changed_by_a_nested_function(self, x, y):
    def double():
        nonlocal x
        x = x * 2

    m = x
    double()
    return m / x.norm()


def changed_by_a_generator(self, x, y):
    parts = ((x := part) for part in y)
    m = x
    next(parts)
    return m / x.norm()


class Private:
    def under_a_private_name(self, x, y):
        n = self.norm(x)
        __m = n
        n = F.relu(n)
        return n + __m


def captured_by_a_comprehension(self, x, y):
    h = x + y
    parts = [h[:, i] for i in range(2)]
    return self.norm(h) + parts[0][:, None]


def in_a_nested_function(self, x, y):
    def inner(x):
        h = self.norm(x)
        return F.relu(h)

    return inner(x) + y


def walrus(self, x, y):
    return F.relu(h := self.norm(x)) + h


def assigned_twice(self, x, y):
    a = b = self.norm(x)
    return F.relu(a) + b


def conditional_expression(self, x, y):
    n = self.norm(x)
    return F.relu(n) if x.sum() > 1e9 else n


def short_circuit(self, x, y):
    n = self.norm(x)
    return (self.se and F.relu(n)) or n * 2


def deleted(self, x, y):
    h = x + y
    del x
    return self.norm(h) + h


def grad_mode_between(self, x, y):
    with torch.no_grad():
        h = x + y
    return self.norm(h)


def two_modes(self, x, y):
    with torch.no_grad():
        n = self.norm(x)
    return F.relu(n) + y


def with_what_catches(self, x, y):
    with contextlib.suppress(RuntimeError):
        h = self.gn(x)
        h = h + y
        h = F.relu(h)
    return h


def with_what_catches_a_sum(self, x, y):
    h = x
    with contextlib.suppress(RuntimeError):
        h = x + y
        n = self.norm(h)
        h = h + n
    return h


def before_a_finally(self, x, y):
    try:
        pass
    finally:
        h = self.norm(x)
        h = F.relu(h)
    return h + y


def return_in_the_middle(self, x, y):
    n = self.norm(x)
    if x.sum() > 0:
        return n
    return F.relu(n)


def return_in_a_branch_that_is_taken(self, x, y):
    h = x
    if self.flag:
        h = x + y
        return h
    return self.norm(h)


def read_in_a_branch_that_is_not(self, x, y):
    h = x + y
    n = self.norm(h)
    if self.se is not None:
        return h * 3
    return n


def branch_changed_in_forward(self, x, y):
    self.flag = not self.flag
    n = self.norm(x)
    if self.flag:
        n = F.relu(n)
    return n


def branch_changed_by_a_method(self, x, y):
    self.requires_grad_(True)
    toggle(self)
    n = self.norm(x)
    if self.flag:
        n = F.relu(n)
    return n


def toggle(module):
    module.flag = not module.flag


def stored_on_self(self, x, y):
    h = x + y
    self.se = h
    return self.norm(h)


def permuted_otherwise(self, x, y):
    return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 2, 1)


def permuted_and_adapted(self, x, y):
    s = y[:, :, :1, :1].permute(0, 2, 3, 1)
    return (self.norm(x.permute(0, 2, 3, 1)) * (1 + s) + s).permute(0, 3, 1, 2)


def scale_without_one(self, x, y):
    return self.norm(x) * y[:, :1] + y[:, 1:2]


def scale_minus(self, x, y):
    return self.norm(x) * (1 - y[:, :1]) + y[:, 1:2]


def starred(self, x, y):
    args = (self.norm(x),)
    return F.relu(*args)


def unbatched(self, x, y):
    return self.leaky(self.inorm(x[0])) + y[0]


def overlapping(self, x, y):
    return F.relu(self.gn(x) + self.gn2(y)) + F.silu(self.gn2(x))


def names_its_class(self, x, y):
    return F.relu(self.norm(x)) * (1 if isinstance(self, Named) else 2)


def norm_called_between(self, x, y):
    h = self.bn(x)
    other = self.bn(y + 3)
    return F.relu(h) + other


def statistics_read_between(self, x, y):
    h = self.bn(x)
    mean = self.bn.running_mean[0] * 2
    return F.relu(h) + y * mean


def statistics_read_by_another_name(self, x, y):
    h = self.bn(x)
    mean = self.bn3.running_mean[0] * 2
    return F.relu(h) + y * mean


def statistics_read_from_a_list(self, x, y):
    h = self.bn(x)
    mean = self.se[0].running_mean[0] * 2
    return F.relu(h) + y * mean


def statistics_read_as_a_buffer(self, x, y):
    h = self.bn(x)
    mean = self.se[0] * 2
    return F.relu(h) + y * mean


def statistics_viewed_before(self, x, y):
    mean = self.bn.running_mean.view(-1)
    h = self.bn(x)
    mean = mean[0] * 2
    return F.relu(h) + y * mean


def statistics_taken_apart_before(self, x, y):
    mean = self.bn.running_mean.chunk(2)[0]
    h = self.bn(x)
    mean = mean[0] * 2
    return F.relu(h) + y * mean


def scaled_skip(self, x, y):
    return F.relu(self.bn(x) + y * self.slope)


def function_of_self_before(self, x, y):
    x = self.se(x)
    h = self.bn(x)
    return F.relu(h + self.conv(x))


class Named:
    """Known to the forward above by a global of the module."""

    forward = names_its_class


names_its_class.__qualname__ = "Named.forward"


@functools.lru_cache(None)
def made_in_a_function() -> Any:
    def forward(self, x, y):
        return F.relu(self.norm(x))

    return forward


def keyword_only(self, x, y, *rest, scale=2.0, **options):
    return F.relu(self.norm(x)) * scale + len(rest) + len(options)


def only_starred(*args):
    self, x, _ = args
    return F.layer_norm(x, (CHANNELS,)) * self.slope


def counted(function):
    """A decorator that knows the function itself, and no other."""
    calls = {function: 0}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls[function] += 1
        return function(*args, **kwargs)

    return wrapper


@counted
def counted_by_the_function(self, x, y):
    return F.relu(self.norm(x)) + y


def noting(function):
    """A decorator that keeps something on the function."""
    function.calls = 0

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        function.calls += 1
        return function(*args, **kwargs)

    return wrapper


@noting
def counted_on_the_function(self, x, y):
    return F.relu(self.norm(x)) + y


LOOK_ALIKES: dict[str, Case] = {
    case.forward.__name__: case
    for case in (
        Case(difference),
        Case(add_alpha),
        Case(add_in_place),
        Case(add_to_a_view),
        Case(changed_between),
        Case(operand_changed_by_a_child),
        Case(norm_input_changed_by_a_child),
        Case(random_numbers_between, (), _IMAGE),
        Case(norm_used_twice),
        Case(alias_changed, (), _IMAGE),
        Case(captured_by_a_lambda),
        Case(captured_annotated),
        Case(captured_by_a_comprehension),
        Case(captured_under_another_name),
        Case(kept_in_a_global),
        Case(changed_by_a_nested_function),
        Case(changed_by_a_generator),
        Case(Private.under_a_private_name),
        Case(in_a_nested_function),
        Case(walrus),
        Case(assigned_twice),
        Case(conditional_expression),
        Case(short_circuit),
        Case(deleted),
        Case(grad_mode_between),
        Case(two_modes),
        Case(with_what_catches, (), (IMAGES, ROWS)),
        Case(with_what_catches_a_sum, (), ((*ROWS[:2], CHANNELS + 1),) * 2),
        Case(before_a_finally),
        Case(return_in_the_middle),
        Case(return_in_a_branch_that_is_taken),
        Case(read_in_a_branch_that_is_not, ("sum + norm",), later=put("se", lambda: True)),
        Case(branch_changed_in_forward),
        Case(branch_changed_by_a_method),
        Case(stored_on_self),
        Case(permuted_otherwise, (), _IMAGE),
        Case(permuted_and_adapted, (), _IMAGE),
        Case(scale_without_one),
        Case(scale_minus),
        Case(starred),
        Case(unbatched, ("inorm + leaky",), _IMAGE),
        Case(norm_called_between, (), _IMAGE),
        Case(statistics_read_between, (), _IMAGE),
        Case(statistics_read_by_another_name, (), _IMAGE, lambda m: setattr(m, "bn3", m.bn)),
        Case(statistics_read_from_a_list, (), _IMAGE, lambda m: setattr(m, "se", [m.bn])),
        Case(statistics_read_as_a_buffer, (), _IMAGE, lambda m: setattr(m, "se", m.bn.running_mean.view(-1))),
        Case(statistics_viewed_before, (), _IMAGE),
        Case(statistics_taken_apart_before, (), _IMAGE),
        Case(scaled_skip, ("bn + residual + relu",), _IMAGE),
        Case(function_of_self_before, ("bn + residual + relu",), _IMAGE, lambda m: setattr(m, "se", F.relu)),
        Case(overlapping, ("gn + residual + relu", "gn2 + silu"), _IMAGE),
        Case(names_its_class, ("norm + relu",)),
        Case(made_in_a_function(), ("norm + relu",)),
        Case(keyword_only, ("norm + relu",)),
        Case(only_starred),
        Case(counted_by_the_function),
        Case(counted_on_the_function),
    )
}
