"""Modules that code reaches by objects, descriptors, decorators, hooks and names: folded the model computes the same,
or what differs stays, with a warning."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import operator
import types
import weakref
from typing import Any, ClassVar

import pytest
import torch
from convolution_models import bn, conv, drawn
from torch import Tensor, nn
from uses_models import Block, X, assert_part_stays, folded

import normswap

GLOBAL: list[Any] = []
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


class Lengths:
    """Its len is not Python's."""

    def len(self, row: Any) -> Any:
        return row[0](X).sum()


class Tapping:
    """A base class."""

    def tap(self: Any, net: Any, x: Any) -> Any:
        return net.row[0](x)


class Listener:
    """No module, whose method is a hook."""

    share = 1.0

    def add(self, module: Any, args: Any, out: Any) -> Any:
        return out + self.share * module[0](args[0])


def plainly(self: Any, x: Any) -> Any:
    return self.row(x)


def otherwise(self: Any, x: Any) -> Any:
    return self.row[0](x)


def of_another_source() -> Any:
    """What runs taps the row; the source that it names does not."""
    lines = plainly.__code__
    code = otherwise.__code__.replace(co_filename=lines.co_filename, co_firstlineno=lines.co_firstlineno)
    return types.FunctionType(code, globals(), "plainly")


def of_the_first(row: Any, x: Any) -> Any:
    return row[0](x)


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


class Contains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn())

    def forward(self, x: Any) -> Any:
        return self.row(x)

    def __contains__(self, x: Any) -> bool:
        self.seen = self.row[0](x)
        return True


class Cases:
    """What a class of Base has besides, by its name."""

    class Object:
        def fill(self: Any) -> None:
            self.runner = Runner(self)

        def more(self: Any, x: Any) -> Any:
            return self.runner(x)

    class Method:
        def fill(self: Any) -> None:
            self.run = Runner(self).__call__

        def more(self: Any, x: Any) -> Any:
            return self.run(x)

    class Slots:
        def fill(self: Any) -> None:
            self.kept = Slotted(self.row)

        def more(self: Any, x: Any) -> Any:
            return self.kept.row[0](x)

    class Deque:
        def fill(self: Any) -> None:
            self.kept = collections.deque([self.row])

        def more(self: Any, x: Any) -> Any:
            return self.kept[0][0](x)

    class Namespace:
        def fill(self: Any) -> None:
            self.kept = types.SimpleNamespace(row=self.row)

        def more(self: Any, x: Any) -> Any:
            return self.kept.row[0](x)

    class Nested:
        def fill(self: Any) -> None:
            self.kept = [[[[[[[[self.row]]]]]]]]

        def more(self: Any, x: Any) -> Any:
            return self.kept[0][0][0][0][0][0][0][0][0](x)

    class BoundGetItem:
        def fill(self: Any) -> None:
            self.get = self.row.__getitem__

        def more(self: Any, x: Any) -> Any:
            return self.get(0)(x)

    class ADescriptor:
        @Descriptor
        def more(self: Any, x: Any) -> Any:
            return self.row[0](x)

    class AGetter:
        stem = property(operator.attrgetter("row.0"))

        def more(self: Any, x: Any) -> Any:
            return self.stem(x)

    class APartial:
        tap = property(functools.partial(lambda place, self: self.row[place], 0))

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class ADispatch:
        @functools.singledispatchmethod
        def tap(self: Any, x: Any) -> Any:
            return self.row[0](x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class ACachedMethod:
        @functools.cache  # noqa: B019
        def stem(self: Any) -> Any:
            return self.row[0]

        def more(self: Any, x: Any) -> Any:
            return self.stem()(x)

    class AContext:
        @contextlib.contextmanager
        def tapping(self: Any) -> Any:
            yield self.row[0]

        def more(self: Any, x: Any) -> Any:
            with self.tapping() as tap:
                return tap(x)

    class AStaticMethod:
        @staticmethod
        def tap(net: Any, x: Any) -> Any:
            return net.row[0](x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(self, x)

    class Starred:
        @star
        def more(self: Any, x: Any) -> Any:
            return self.row[0](x)

    class OnlyStars:
        def more(*args: Any) -> Any:
            self, x = args
            return self.row[0](x)

    class Adds:
        @adding
        def more(self: Any, x: Any) -> Any:
            return x

    class WrapsAnother:
        @functools.wraps(Base.forward)
        def forward(self: Any, x: Any) -> Any:
            return self.row(x) + self.row[0](x)

    class CalledCheckpoint:
        def more(self: Any, x: Any) -> Any:
            return self._checkpointed(self.row, x)

        def _checkpointed(self: Any, row: Any, x: Any) -> Any:
            return row[0](x)

    class GetItem:
        def fill(self: Any) -> None:
            self.kept = OwnGetItem([nn.Sequential(conv(), bn())])

        def more(self: Any, x: Any) -> Any:
            for row in self.kept:
                x = row(x)
            return x + self.kept[0](x)

    class SuperGetItem:
        def fill(self: Any) -> None:
            self.row = Tapped(conv(), bn(), nn.ReLU())

        def more(self: Any, x: Any) -> Any:
            return self.row.tap(x)

    class GetItemByName:
        def fill(self: Any) -> None:
            self.row = Tapped(conv(), bn(), nn.ReLU())

        def more(self: Any, x: Any) -> Any:
            return self.row.tap_by_name(x)

    class SuperChildren:
        def more(self: Any, x: Any) -> Any:
            return sum(one[0](x) for one in super().children())

    class GetattrByName:
        def more(self: Any, x: Any) -> Any:
            return nn.Module.__getattr__(self, "row")[0](x)

    class OwnGetattribute:
        def __getattribute__(self: Any, name: str) -> Any:
            found = object.__getattribute__(self, "_modules") if name == "stem" else None
            return found["row"][0] if found else object.__getattribute__(self, name)

        def more(self: Any, x: Any) -> Any:
            return self.stem(x)

    class BoundSelf:
        def more(self: Any, x: Any) -> Any:
            return self.row.forward.__self__[0](x)

    class Evaluated:
        def more(self: Any, x: Any) -> Any:
            return eval("self.row[0](x)")

    class Alias:
        def more(self: Any, x: Any) -> Any:
            layers: list[Any] = []
            other = layers
            other.append(self.row[0])
            return layers[0](x)

    class Filled:
        def more(self: Any, x: Any) -> Any:
            layers: list[Any] = []
            fill_list(layers, self.row)
            return layers[0](x)

    class Sliced:
        def fill(self: Any) -> None:
            self.block = Block()

        def more(self: Any, x: Any) -> Any:
            return self.block(x) + sum(one.conv(x) for one in (self.block, self.block)[:1])

    class AGlobal:
        def more(self: Any, x: Any) -> Any:
            global KEPT
            KEPT = self.row
            return of_the_kept(x)

    class AComparison:
        def fill(self: Any) -> None:
            self.kept = Contains()

        def more(self: Any, x: Any) -> Any:
            return self.kept(x) + (self.kept.seen if x in self.kept else 0)

    class ItsText:
        def more(self: Any, x: Any) -> Any:
            return x * len(f"{self.row}")

    class ItsName:
        def more(self: Any, x: Any) -> Any:
            return x * (2 if self.row[1]._get_name() == "BatchNorm2d" else 1)

    class Compiled:
        def fill(self: Any) -> None:
            self.block = torch.compile(Block(), backend="eager")

        def more(self: Any, x: Any) -> Any:
            return self.block.conv(x)

    class AHook:
        def fill(self: Any) -> None:
            self.row.register_forward_hook(lambda module, args, out: out + module[0](args[0]))

    class AHookOfTheRoot:
        def fill(self: Any) -> None:
            self.register_forward_hook(lambda module, args, out: out + module.row[0](args[0]))

    class AHookBefore:
        def fill(self: Any) -> None:
            self.register_forward_pre_hook(of_the_module)

    class AMethodAsAHook:
        def fill(self: Any) -> None:
            self.other.register_forward_hook(self.tap)

        def tap(self: Any, module: Any, args: Any, out: Any) -> Any:
            return out + module[0](args[0])

    class AHookWithKwargs:
        def fill(self: Any) -> None:
            self.row.register_forward_hook(lambda m, args, kwargs, out: out + m[0](args[0]), with_kwargs=True)

    class AMethodOfAnObjectAsAHook:
        def fill(self: Any) -> None:
            self.row.register_forward_hook(Listener().add)

    class AMethodThatUsesTheModuleAlone:
        def fill(self: Any) -> None:
            self.register_forward_hook(self.note)

        def note(self: Any, module: Any, args: Any, out: Any) -> Any:
            return out + module.row[0](args[0])

    class AMethodThatIsNoFunction:
        def fill(self: Any) -> None:
            self.tap = types.MethodType(functools.partial(otherwise), self)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class DeeperThanIsLookedInto:
        def fill(self: Any) -> None:
            self.deep = [[[[[[[self.other]]]]]]]

        def more(self: Any, x: Any) -> Any:
            return x * len(self.deep)

    class WrappedByAGlobal:
        @by_a_global
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class WrappedWithAnother:
        @with_another(otherwise)
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class AnotherLen:
        def fill(self: Any) -> None:
            self.lengths = Lengths()

        def more(self: Any, x: Any) -> Any:
            return x * self.lengths.len(self.row)

    class AnInstanceOverItsMethod:
        def fill(self: Any) -> None:
            self.tap = of_the_first

        def tap(self: Any, row: Any, x: Any) -> Any:
            return row(x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(self.row, x)

    class WhatLiesDeepElsewhere:
        def fill(self: Any) -> None:
            rows: list[Any] = [self.row]
            self.box, self.kept = types.SimpleNamespace(deep=[[[[[rows]]]]]), rows

        def more(self: Any, x: Any) -> Any:
            return len(self.box.deep) * self.kept[0][0](x)

    class AnotherSource:
        more = of_another_source()

    class WrappedByText:
        @by_its_text
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class ValuesNotCalled:
        def more(self: Any, x: Any) -> Any:
            out, rows = [x], {"a": self.row}
            each_into(rows.values, out)
            return out[-1]

    class PopNotCalled:
        def more(self: Any, x: Any) -> Any:
            out, rows = [x], [self.row]
            drained_into(rows.pop, out)
            return out[-1]

    class ChildrenNotCalled:
        def more(self: Any, x: Any) -> Any:
            out = [x]
            first_into(self.row.children, out)
            return out[-1]

    class BehindAStar:
        def more(self: Any, x: Any) -> Any:
            return of_the_third(*[x, x], self.row)

    class AFormOfAnother:
        def more(self: Any, x: Any) -> Any:
            out: list[Any] = []
            dtype = noted(self.row[0].weight, out).dtype
            return out[0].to(dtype)

    class BuffersLast:
        def more(self: Any, x: Any) -> Any:
            return x.to(next(self.row.buffers()).device)


KEPT: Any = None


def of_the_kept(x: Any) -> Any:
    return KEPT[0](x)


def of_the_module(module: Any, args: Any) -> Any:
    return (args[0] + module.row[0](args[0]),)


def made_of(cases: type) -> dict[str, Any]:
    return {name: type(name, (case, Base), {}) for name, case in vars(cases).items() if isinstance(case, type)}


MADE = made_of(Cases)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
def test_what_is_reached_so_stays(name: str) -> None:
    assert_part_stays(drawn(MADE[name]))


class InPlace:
    """What a copy of a model does not do: functions are no copies."""

    class ADefault:
        def fill(self: Any) -> None:
            self.tap = lambda x, row=self.row: row[0](x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class ANamedDefault:
        def fill(self: Any) -> None:
            def tap(x: Any, *, row: Any = self.row) -> Any:
                return row[0](x)

            self.tap = tap

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class OfAGlobalList:
        def fill(self: Any) -> None:
            GLOBAL.append(self.row)

        def more(self: Any, x: Any) -> Any:
            return GLOBAL[-1][0](x)

    class OfAClass:
        kept: ClassVar[list[Any]] = []

        def fill(self: Any) -> None:
            self.kept.append(self.row)

        def more(self: Any, x: Any) -> Any:
            return self.kept[-1][0](x)

    class AProxy:
        def fill(self: Any) -> None:
            self.net = [weakref.proxy(self)]

        def more(self: Any, x: Any) -> Any:
            return self.net[0].row[0](x)


OF_FUNCTIONS = made_of(InPlace)


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_in_place_functions_are_those_of_the_model(name: str) -> None:
    model = drawn(OF_FUNCTIONS[name])
    expected = model(X)
    with pytest.warns(UserWarning, match=r"row\.1 is left as it is"):
        normswap.fold(model, inplace=True)
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)


class Harmless:
    class Decorated:
        @logged
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class DecoratedForward:
        @logged
        def forward(self: Any, x: Any) -> Any:
            return self.other(self.row(x))

    class WithoutGradients:
        @torch.no_grad()
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class OfNumbers:
        def fill(self: Any) -> None:
            self.settings = types.SimpleNamespace(scale=2.0, sizes=[1, 2], names={"a": "b"})

        def more(self: Any, x: Any) -> Any:
            return self.row(x) * self.settings.scale

    class OfWhatIsGone:
        def more(self: Any, x: Any) -> Any:
            return self.row(x) * len(GONE)

    class OfAListOfItsOwn:
        def fill(self: Any) -> None:
            self.sizes = [Unwilling([1]), UnwillingTable(a=1)]

        def more(self: Any, x: Any) -> Any:
            return self.row(x) * len(self.sizes)

    class OfDeepNumbers:
        def fill(self: Any) -> None:
            self.settings = types.SimpleNamespace(deep=[[[[[[[[2.0]]]]]]]])

        def more(self: Any, x: Any) -> Any:
            return self.row(x) * len(self.settings.deep)

    class KeepsAForward:
        def fill(self: Any) -> None:
            self.run = self.row.forward

        def more(self: Any, x: Any) -> Any:
            return self.run(x)

    class HoldsNothing:
        def fill(self: Any) -> None:
            self.register_module("down", None)

        def more(self: Any, x: Any) -> Any:
            return self.row(x) * len([*self.children()])

    class AsksForOthers:
        def more(self: Any, x: Any) -> Any:
            return x if isinstance(self.row[1], (nn.Conv2d, nn.Linear)) else self.row(x)

    class AsDeepAsIsLookedInto:
        def more(self: Any, x: Any) -> Any:
            deep = [[[[[[self.row]]]]]]
            return deep[0][0][0][0][0][0](x)

    class Logs:
        def fill(self: Any) -> None:
            self.log_to = logging.getLogger("normswap.tests")

        def more(self: Any, x: Any) -> Any:
            self.log_to.debug("a row")
            return self.row(x)

    class Keeps:
        def fill(self: Any) -> None:
            self.kept: Any = []

            def keep(module: Any, args: Any, out: Any) -> None:
                self.kept.append(out.shape)

            self.row.register_forward_hook(keep)

    class Hooked:
        def fill(self: Any) -> None:
            self.register_forward_hook(lambda module, args, out: out * 2)
            self.row.register_forward_pre_hook(lambda _, args: None)


WHOLE = made_of(Harmless)


@pytest.mark.parametrize("name", WHOLE)
def test_what_takes_nothing_apart_folds(name: str) -> None:
    model = drawn(WHOLE[name])
    made, told = folded(model)
    assert not told and not any(isinstance(one, nn.BatchNorm2d) for one in made.modules())
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


# --- what a whole that becomes an nn.Linear has -----------------------------------------------------------------------


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.scale = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.fc(x) * self.scale)

    @property
    def dtype(self) -> Any:
        return self.fc.weight.dtype


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.other = Projection(), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Any:
        return self.other(self.part(x)) + self.part.scale


class AsksForItsDtype(Reads):
    def forward(self, x: Tensor) -> Any:
        return self.other(self.part(x.to(self.part.dtype)))


@pytest.mark.parametrize("cls", [Reads, AsksForItsDtype])
def test_what_an_nn_linear_lacks_stays(cls: Any) -> None:
    model, x = drawn(cls), torch.randn(9, 6)
    made, told = folded(model)
    assert told and type(made.part) is Projection and type(made.other) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)
    assert type(copy.deepcopy(model).part) is Projection


class Strong(nn.Sequential):
    @property
    def strength(self) -> Any:
        return self[0].weight.norm()


class ReadsByAProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Strong(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.other = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Any:
        return self.other(self.part(x)) * self.part.strength


def test_a_linear_whose_weight_is_read_stays() -> None:
    model, x = drawn(ReadsByAProperty), torch.randn(9, 6)
    made, told = folded(model)
    assert told and type(made.part[1]) is nn.BatchNorm1d and type(made.other) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)


class OfABase(Tapping, Base):
    def more(self: Any, x: Any) -> Any:
        return Tapping.tap(self.other, self, x)


def test_a_method_of_a_base_that_gets_the_module_besides() -> None:
    assert_part_stays(drawn(OfABase))


class Tools:
    """Whose methods are called as Python's functions are."""

    def tap(self, row: Any, x: Any) -> Any:
        return row[0](x)

    isinstance = str = len = super = getattr = setattr = next = list = enumerate = zip = tap


class Called:
    def isinstance_of_another(self: Any, x: Any) -> Any:
        return self.tools.isinstance(self.row, x)

    def str_of_another(self: Any, x: Any) -> Any:
        return self.tools.str(self.row, x)

    def len_of_another(self: Any, x: Any) -> Any:
        return self.tools.len(self.row, x)

    def super_of_another(self: Any, x: Any) -> Any:
        return self.tools.super(self.row, x)

    def getattr_of_another(self: Any, x: Any) -> Any:
        return self.tools.getattr(self.row, x)

    def setattr_of_another(self: Any, x: Any) -> Any:
        return self.tools.setattr(self.row, x)

    def next_of_another(self: Any, x: Any) -> Any:
        return self.tools.next(self.row, x)

    def list_of_another(self: Any, x: Any) -> Any:
        return self.tools.list(self.row, x)

    def enumerate_of_another(self: Any, x: Any) -> Any:
        return self.tools.enumerate(self.row, x)

    def zip_of_another(self: Any, x: Any) -> Any:
        return self.tools.zip(self.row, x)


@pytest.mark.parametrize("name", [name for name in vars(Called) if name.endswith("_of_another")])
def test_a_method_is_not_what_it_is_called_as(name: str) -> None:
    more = {"fill": lambda self: setattr(self, "tools", Tools()), "more": vars(Called)[name]}
    assert_part_stays(drawn(type("Calls", (Base,), more)))
