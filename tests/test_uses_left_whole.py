"""What objects, decorators, hooks and properties leave whole folds; in place, and where a Linear is what folds, what
they reach stays."""

from __future__ import annotations

import copy
import functools
import logging
import types
import weakref
from typing import Any, ClassVar

import pytest
import torch
from convolution_models import drawn
from torch import Tensor, nn
from uses_models import X, folded
from uses_objects_models import (
    GLOBAL,
    GONE,
    HOLDER,
    Unwilling,
    UnwillingTable,
    cached,
    logged,
    made_of,
    of_its_self,
    of_the_global_list,
)

import normswap


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

    class OfAGlobalListInside:
        def fill(self: Any) -> None:
            GLOBAL.append(self.row)

        def more(self: Any, x: Any) -> Any:
            return sum(one() for one in [lambda: GLOBAL[-1][0](x)])

    class OfAFunctionWithAGlobalList:
        def fill(self: Any) -> None:
            GLOBAL.append(self.row)

        def more(self: Any, x: Any) -> Any:
            return of_the_global_list(x)

    class OfAStaticMethodWithAGlobalList:
        def fill(self: Any) -> None:
            GLOBAL.append(self.row)

        @staticmethod
        def tap(x: Any) -> Any:
            return GLOBAL[-1][0](x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class OfAGlobalObject:
        def fill(self: Any) -> None:
            HOLDER.row = self.row

        def more(self: Any, x: Any) -> Any:
            return HOLDER.row[0](x)

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


class TapsItsRow:
    def tap(self: Any, x: Any) -> Any:
        return self.row[0](x)


class Harmless:
    class Decorated:
        @logged
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class DecoratedForward:
        @logged
        def forward(self: Any, x: Any) -> Any:
            return self.other(self.row(x))

    class WrappedWithItsSelf:
        @of_its_self
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class WrappedWithACache:
        @cached
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

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

    class KeepsAMethod:
        def fill(self: Any) -> None:
            self.run = self.whole

        def whole(self: Any, x: Any) -> Any:
            return self.row(x)

        def more(self: Any, x: Any) -> Any:
            return self.run(x)

    class HandsOnItsForward:
        def __call__(self: Any, *args: Any) -> Any:
            return functools.partial(super().__call__, *args)()

    class ThroughTwoMethods:
        def more(self: Any, x: Any) -> Any:
            return self.outer(self.row, x)

        def outer(self: Any, layer: Any, x: Any) -> Any:
            return self.inner(layer, x)

        def inner(self: Any, layer: Any, x: Any) -> Any:
            return layer(x)

    class OverAMethodThatTaps(TapsItsRow):
        def tap(self: Any, x: Any) -> Any:
            return self.row(x)

        def more(self: Any, x: Any) -> Any:
            return self.tap(x)

    class CalledAsOneOfPyTorchs:
        def half(self: Any, x: Any) -> Any:
            return self.row(x)

        def more(self: Any, x: Any) -> Any:
            return self.half(x)

    class AStaticMethod:
        @staticmethod
        def halves(x: Any) -> Any:
            return torch.cat([x, x[:0]])

        def more(self: Any, x: Any) -> Any:
            return self.row(self.halves(x))

    class ItsDtype:
        @property
        def dtype(self: Any) -> Any:
            return [*self.parameters()][0].dtype  # noqa: RUF015

        def more(self: Any, x: Any) -> Any:
            return self.row(x.to(self.dtype))

    class ObjectsThatKnowEachOther:
        def fill(self: Any) -> None:
            several = [types.SimpleNamespace() for _ in range(1000)]
            for one in several:
                one.others = several
            self.kept = several[0]

        def more(self: Any, x: Any) -> Any:
            return self.row(x) * len(self.kept.others)

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
                self.kept.append((object(), out.shape))

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
