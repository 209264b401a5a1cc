"""Modules that hooks, decorators and functions of stars reach: what differs folded stays, with a warning."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from convolution_models import drawn
from uses_models import assert_part_stays
from uses_objects_models import (
    Base,
    Listener,
    adding,
    by_a_global,
    by_its_text,
    made_of,
    of_another_source,
    of_its_row,
    otherwise,
    star,
    with_another,
    with_another_besides,
)


def of_the_module(module: Any, args: Any) -> Any:
    return (args[0] + module.row[0](args[0]),)


class Cases:
    """What a class of Base has besides, by its name."""

    class Starred:
        @star
        def more(self: Any, x: Any) -> Any:
            return self.row[0](x)

    class OnlyStars:
        def more(*args: Any) -> Any:
            self, x = args
            return self.row[0](x)

    class OnlyStarsAndNames:
        def more(*args: Any, times: Any = 1) -> Any:
            self, x = args
            return times * self.row[0](x)

    class NamesBehindIt:
        def more(self: Any, x: Any, *, times: Any = 1) -> Any:
            return times * self.row[0](x)

    class Adds:
        @adding
        def more(self: Any, x: Any) -> Any:
            return x

    class WrapsAnother:
        @functools.wraps(Base.forward)
        def forward(self: Any, x: Any) -> Any:
            return self.row(x) + self.row[0](x)

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

    class AnObjectAsAHook:
        def fill(self: Any) -> None:
            self.row.register_forward_hook(Listener())

    class AHookOfStars:
        def fill(self: Any) -> None:
            def tap(*args: Any, times: Any = 1) -> Any:
                return args[2] + times * args[0][0](args[1][0])

            self.row.register_forward_hook(tap)

    class AMethodThatUsesTheModuleAlone:
        def fill(self: Any) -> None:
            self.register_forward_hook(self.note)

        def note(self: Any, module: Any, args: Any, out: Any) -> Any:
            return out + module.row[0](args[0])

    class WrappedByAGlobal:
        @by_a_global
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class WrappedWithAnother:
        @with_another(otherwise)
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class WrappedWithAnotherBesides:
        @with_another_besides(otherwise)
        def more(self: Any, x: Any) -> Any:
            return self.row(x)

    class AnotherSource:
        more = of_another_source()

    class WrappedWithItsRow:
        @of_its_row
        def more(row: Any, x: Any) -> Any:
            return row[0](x)

    class WrappedByText:
        @by_its_text
        def more(self: Any, x: Any) -> Any:
            return self.row(x)


MADE = made_of(Cases)


@pytest.mark.parametrize("name", MADE)
def test_what_is_reached_so_stays(name: str) -> None:
    assert_part_stays(drawn(MADE[name]))
