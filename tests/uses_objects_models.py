"""What the models of test_uses_objects.py and test_uses_left_whole.py are made of: a base, and what keeps or hands on
its modules."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from convolution_models import bn, conv
from torch import Tensor, nn
from uses_models import X

GLOBAL: list[Any] = []
HOLDER = types.SimpleNamespace()
GONE = [weakref.proxy(type("Gone", (), {})())]


class Unwilling(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise RuntimeError

    __bool__ = __iter__

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class UnwillingTable(dict):  # type: ignore[type-arg]
    def values(self) -> Any:
        raise RuntimeError


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.other = nn.Sequential(conv(), bn(), nn.ReLU()), nn.Sequential(conv(), bn())
        self.fill()

    def fill(self) -> None:
        """With more."""

    def forward(self, x: Tensor) -> Any:
        return self.other(self.row(x)) + self.more(x)

    def more(self: Any, x: Any) -> Any:
        return 0


class Runner:
    def __init__(self, net: Any) -> None:
        self.net = net

    def __call__(self, x: Any) -> Any:
        return self.net.row[0](x)


class Slotted:
    __slots__ = ("row",)

    def __init__(self, row: Any) -> None:
        self.row = row


class Descriptor:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, module: Any, cls: Any = None) -> Any:
        return functools.partial(self.function, module)


def star(function: Any) -> Any:
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def by_its_text(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return eval("args[0].row[0](args[1])") + function(*args)

    return call


def by_a_global(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return otherwise(*args) + function(*args)

    return call


def with_another(other: Any) -> Any:
    def wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def call(self: Any, x: Any) -> Any:
            return other(self, x) + function(self, x)

        return call

    return wrapper


def with_another_besides(other: Any) -> Any:
    def wrapper(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return other(*args) + function(*args)

        return call

    return wrapper


def of_its_self(function: Any) -> Any:
    @functools.wraps(function)
    def call(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return call


def of_its_row(function: Any) -> Any:
    @functools.wraps(function)
    def call(self: Any, x: Any) -> Any:
        return function(self.row, x)

    return call


def cached(function: Any) -> Any:
    kept = functools.lru_cache(maxsize=1)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return kept(*args)

    return call


class Lengths:
    """Its len is not Python's."""

    def len(self, row: Any) -> Any:
        return row[0](X).sum()


class Tapping:
    """A base class."""

    def tap(self: Any, net: Any, x: Any) -> Any:
        return net.row[0](x)

    def first(self: Any, x: Any) -> Any:
        return self[0](x)


class Listener:
    """No module, whose method is a hook."""

    share = 1.0

    def add(self, module: Any, args: Any, out: Any) -> Any:
        return out + self.share * module[0](args[0])

    __call__ = add


def plainly(self: Any, x: Any) -> Any:
    return self.row(x)


def otherwise(self: Any, x: Any) -> Any:
    return self.row[0](x)


def of_another_source() -> Any:
    """What runs taps the row; the source that it names does not."""
    lines = plainly.__code__
    place = {"co_filename": lines.co_filename, "co_firstlineno": lines.co_firstlineno, "co_name": lines.co_name}
    code = otherwise.__code__.replace(**place)
    return types.FunctionType(code, globals(), "plainly")


def of_the_first(row: Any, x: Any) -> Any:
    return row[0](x)


def of_the_global_list(x: Any) -> Any:
    return GLOBAL[-1][0](x)


def each_into(of: Any, out: Any) -> None:
    out += [one[0](out[0]) for one in of()]


def drained_into(pop: Any, out: Any) -> None:
    out.append(pop()[0](out[0]))


def first_into(children: Any, out: Any) -> None:
    out.append(next(children())(out[0]))


def of_the_third(x: Any, beside: Any, row: Any) -> Any:
    return row[0](x)


def noted(weight: Any, out: Any) -> Any:
    out.append(weight.sum())
    return weight


def adding(function: Any) -> Any:
    @functools.wraps(function)
    def inner(self: Any, x: Any) -> Any:
        return function(self, x) + self.row[0](x)

    return inner


def fill_list(layers: Any, row: Any) -> None:
    layers.append(row[0])


class OwnGetItem(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return self._modules[str(index)][0]  # type: ignore[index]


class Tapped(nn.Sequential):
    def tap(self, x: Any) -> Any:
        return super().__getitem__(0)(x)

    def tap_by_name(self, x: Any) -> Any:
        return nn.Sequential.__getitem__(self, 0)(x)


class Indexed(nn.Sequential):
    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)

    def tap(self, x: Any) -> Any:
        return super().__getitem__(0)(x)

    def tap_by_name(self, x: Any) -> Any:
        return nn.Sequential.__getitem__(self, 0)(x)


class Foreign(nn.Module):
    def __init__(self, row: nn.Module) -> None:
        super().__init__()
        self.inner = row

    def forward(self, x: Any) -> Any:
        return self.inner[0](x)  # type: ignore[index]


class Contains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn())

    def forward(self, x: Any) -> Any:
        return self.row(x)

    def __contains__(self, x: Any) -> bool:
        self.seen = self.row[0](x)
        return True


def made_of(cases: type) -> dict[str, Any]:
    return {name: type(name, (case, Base), {}) for name, case in vars(cases).items() if isinstance(case, type)}
