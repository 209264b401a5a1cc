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


class Slotted(Base):
    __slots__ = ("tag",)

    def __new__(cls, tag: int = 3) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "tag", tag)
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (self.tag,)


KEPT: list[Callable[[], nn.Module]] = [
    *(AsksAboveItself, Counts, CountsByName, CountsInAClassMethod, Sets, InAProperty, Slotted),
]


@pytest.mark.parametrize("make", KEPT)
def test_it_keeps_its_class_and_says_why(make: Any) -> None:
    model = randomised(nn.ModuleList([make()]))
    swapped = normswap.apply(model, normswap.plan(model))
    assert type(swapped[0]) is make and type(swapped[0].norm) is not nn.LayerNorm
    rows = {row["name"]: row for row in normswap.report(swapped).rows}
    assert rows["0"]["code"] == "OWN_CLASS" and make.__name__ in rows["0"]["reason"] and rows["0"]["cure"]
    assert type(swapped.train()[0]) is make and type(copy.deepcopy(swapped)[0]) is make


@pytest.mark.parametrize("make", (Counts, CountsByName, CountsInAClassMethod))
def test_what_it_counts_is_its_own(make: Any) -> None:
    model, x = randomised(make()), torch.randn(3, 8)
    normswap.apply(model, normswap.plan(model), inplace=True)
    before = make.calls
    model(x, x)
    assert make.calls > before and "calls" in vars(make)


class Harmless(Base):
    def __init__(self) -> None:
        super(self.__class__, self).__init__()  # of an instance of this class

    def notes(self, count: int) -> None:
        self.__class__.cache["calls"] = count
        self.kind = type(self).__name__

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
