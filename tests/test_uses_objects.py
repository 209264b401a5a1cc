"""Modules that code reaches by objects, descriptors and names: what differs folded stays, with a warning."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
from typing import Any

import pytest
import torch
from convolution_models import bn, conv, drawn
from torch import nn
from uses_models import Block, assert_part_stays
from uses_objects_models import (
    Base,
    Contains,
    Descriptor,
    Foreign,
    Indexed,
    Lengths,
    OwnGetItem,
    Runner,
    Slotted,
    Tapped,
    Tapping,
    drained_into,
    each_into,
    fill_list,
    first_into,
    made_of,
    noted,
    of_the_first,
    of_the_third,
    otherwise,
)

KEPT: Any = None


def of_the_kept(x: Any) -> Any:
    return KEPT[0](x)


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

    class SuperGetItemOverItsOwn:
        def fill(self: Any) -> None:
            self.row = Indexed(conv(), bn(), nn.ReLU())

        def more(self: Any, x: Any) -> Any:
            return self.row.tap(x)

    class GetItemByNameOverItsOwn:
        def fill(self: Any) -> None:
            self.row = Indexed(conv(), bn(), nn.ReLU())

        def more(self: Any, x: Any) -> Any:
            return self.row.tap_by_name(x)

    class SuperChildren:
        def more(self: Any, x: Any) -> Any:
            return sum(one[0](x) for one in super().children())

    class AComputedAttribute:
        def fill(self: Any) -> None:
            self.kept_a = [self.row]

        def more(self: Any, x: Any, way: str = "a") -> Any:
            return getattr(self, f"kept_{way}")[0][0](x)

    class AComputedPrivateAttribute:
        def fill(self: Any) -> None:
            setattr(self, "__kept_a", [self.row])

        def more(self: Any, x: Any, way: str = "a") -> Any:
            return getattr(self, f"__kept_{way}")[0][0](x)

    class AComputedWeight:
        def more(self: Any, x: Any, name: str = "weight") -> Any:
            return getattr(self.row[0], name).mean()

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

    class AMethodThatIsNoFunction:
        def fill(self: Any) -> None:
            self.tap = types.MethodType(functools.partial(otherwise), self)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class AnotherModelThatHoldsIt:
        def fill(self: Any) -> None:
            self.kept = [Foreign(self.row)]

        def more(self: Any, x: Any) -> Any:
            return self.kept[0](x)

    class AnObjectAsDeepAsIsLookedInto:
        def fill(self: Any) -> None:
            self.kept = [[[[[[types.SimpleNamespace(row=self.row)]]]]]]

        def more(self: Any, x: Any) -> Any:
            return self.kept[0][0][0][0][0][0].row[0](x)

    class AKey:
        def fill(self: Any) -> None:
            self.kept = {self.row: 1}

        def more(self: Any, x: Any) -> Any:
            return sum(row[0](x) for row in self.kept)

    class ASettledQuestion:
        def more(self: Any, x: Any) -> Any:
            return 1 if x is None and isinstance(self.row[1], otherwise) else 0  # type: ignore[arg-type]

    class DeeperThanIsLookedInto:
        def fill(self: Any) -> None:
            self.deep = [[[[[[[self.other]]]]]]]

        def more(self: Any, x: Any) -> Any:
            return x * len(self.deep)

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


MADE = made_of(Cases)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
def test_what_is_reached_so_stays(name: str) -> None:
    assert_part_stays(drawn(MADE[name]))


class OfABase(Tapping, Base):
    def more(self: Any, x: Any) -> Any:
        return Tapping.tap(self.other, self, x)


class OfARow(Tapping, Base):
    def more(self: Any, x: Any) -> Any:
        return Tapping.first(self.row, x)


@pytest.mark.parametrize("cls", [OfABase, OfARow])
def test_a_method_of_a_base_that_gets_another_module(cls: Any) -> None:
    assert_part_stays(drawn(cls))


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
