"""Classes whose code takes the class of self for themselves keep it on every instance."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap


class Base(nn.Module):
    calls = 0
    cache: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        self.notes(len(x))
        return F.gelu(self.norm(x + r))

    def notes(self, count: int) -> None:
        """Nothing."""


class AsksAboveItself(Base):
    def train(self, mode: bool = True) -> AsksAboveItself:
        return super(self.__class__, self).train(mode)


class Counts(Base):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        type(self).calls += 1
        return F.gelu(self.norm(x + r))


class CountsByName(Base):
    def notes(self, count: int) -> None:
        known = self.__class__
        known.calls = known.calls + count


class CountsInAClassMethod(Base):
    @classmethod
    def notes(cls, count: int) -> None:
        cls.calls += count


class Sets(Base):
    @functools.lru_cache  # noqa: B019
    def notes(self, count: int) -> None:
        setattr(type(self), "calls", count)  # noqa: B010


class InAProperty(Base):
    def notes(self, count: int) -> None:
        self.last = self.again

    @property
    def again(self) -> int:
        type(self).calls += 1
        return self.calls


class InAComprehension(Base):
    def notes(self, count: int) -> None:
        [self.note() for _ in range(count)]

    def note(self) -> None:
        type(self).calls += 1


class InAFunctionInside(Base):
    def notes(self, count: int) -> None:
        def note() -> None:
            type(self).calls += count

        note()


class BySetattr(Base):
    def notes(self, count: int) -> None:
        type.__setattr__(type(self), "calls", count)


class ByAWalrus(Base):
    def notes(self, count: int) -> None:
        (cls := type(self)).calls += count  # noqa: F841


class ByATuple(Base):
    def notes(self, count: int) -> None:
        cls, more = type(self), 1
        cls.calls += more


class ByAnAnnotation(Base):
    def notes(self, count: int) -> None:
        cls: Any = self.__class__
        cls.calls += count


class ByAFunction(Base):
    def notes(self, count: int) -> None:
        bump(self)


class ByAFunctionOfItsClass(Base):
    def notes(self, count: int) -> None:
        bump_class(type(self))


def bump(module: Any) -> None:
    bump_again(1, module)


def bump_again(count: int, module: Any) -> None:
    type(module).calls += count


def bump_class(cls: Any) -> None:
    cls.calls += 1


class ByAName(Base):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        getattr(self, "note")()  # noqa: B009
        return F.gelu(self.norm(x + r))

    def note(self) -> None:
        type(self).calls += 1


class WhenCalled(Base):
    def __call__(self, x: Tensor, r: Tensor) -> Any:
        type(self).calls += 1
        return super().__call__(x, r)


class InACachedProperty(Base):
    def notes(self, count: int) -> None:
        self.last = self.once

    @functools.cached_property
    def once(self) -> int:
        type(self).calls += 1
        return self.calls


class SaysItself(Base):
    @property
    def __class__(self) -> Any:
        return SaysItself


WRITING = (
    *(InAComprehension, InAFunctionInside, BySetattr, ByAWalrus, ByATuple, ByAnAnnotation, ByAFunction),
    *(ByAFunctionOfItsClass, ByAName, WhenCalled, InACachedProperty),
)


class Slotted(Base):
    __slots__ = ("tag",)

    def __new__(cls, tag: int = 3) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "tag", tag)
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (self.tag,)


KEPT: list[Callable[[], nn.Module]] = [
    *(AsksAboveItself, Counts, CountsByName, CountsInAClassMethod, Sets, InAProperty, Slotted, SaysItself, *WRITING),
]


@pytest.mark.parametrize("make", KEPT)
def test_it_keeps_its_class_and_says_why(make: Any) -> None:
    model = randomised(nn.ModuleList([make()]))
    swapped = normswap.apply(model, normswap.plan(model))
    assert type(swapped[0]) is make and type(swapped[0].norm) is not nn.LayerNorm
    rows = {row["name"]: row for row in normswap.report(swapped).rows}
    assert rows["0"]["code"] == "OWN_CLASS" and make.__name__ in rows["0"]["reason"] and rows["0"]["cure"]
    assert type(swapped.train()[0]) is make and type(copy.deepcopy(swapped)[0]) is make


@pytest.mark.parametrize("make", (Counts, CountsByName, CountsInAClassMethod, *WRITING))
def test_what_it_counts_is_its_own(make: Any) -> None:
    model, x = randomised(make()), torch.randn(3, 8)
    normswap.apply(model, normswap.plan(model), inplace=True)
    before = make.calls
    model(x, x)
    assert make.calls > before and "calls" in vars(make)


class AttributeDict(dict):  # type: ignore[type-arg]
    """As many configurations are: asked for anything it is no name of, it raises a KeyError."""

    __getattr__ = dict.__getitem__


class Harmless(Base):
    config = AttributeDict(scale=1.0)

    def __init__(self) -> None:
        super(self.__class__, self).__init__()  # of an instance of this class

    def notes(self, count: int) -> None:
        self.__class__.cache["calls"] = count
        self.kind = type(self).__name__
        assert isinstance(self, type(self)) and self.config.scale == 1.0

    @classmethod
    def made(cls) -> Harmless:
        cls.calls += 1  # nothing that a forward does
        return cls()

    def extra_repr(self) -> str:
        return self.__class__.__name__ + super().extra_repr()


def test_what_only_reads_its_class_is_swapped() -> None:
    model, x = randomised(Harmless()), torch.randn(3, 8)
    swapped = normswap.apply(model, normswap.plan(model))
    assert type(swapped) is not Harmless and isinstance(swapped, Harmless)
    torch.testing.assert_close(swapped(x, x), model(x, x))
    assert swapped.kind == "Harmless" and Harmless.cache == {"calls": 3}
