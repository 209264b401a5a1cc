"""Which BatchNorm normalises what a convolution in another method gives (regions.through_methods), by the words of the
methods."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from region_checks import loaded
from torch import Tensor, nn

from normswap.regions.through_methods import through_methods

HEAD = """
import torch
from torch.utils.checkpoint import checkpoint

def same(function):
    return function

def thinly(function, *given):
    return checkpoint(function, *given, use_reentrant=False)

def by_another(function, other):
    return checkpoint(other, function)

def twice(function, x):
    return checkpoint(function, checkpoint(function, x))

def either(function, x):
    if x is None:
        return checkpoint(function, x)
    return checkpoint(same, x)

def inside(function, x):
    with torch.no_grad():
        return checkpoint(function, x)

def without():
    return checkpoint()

def sums(function, x):
    return function + x

class Written:
"""
FIRST = "return self.norm(self.first(x)) || "
INNER = "def of(y):|    return self.conv(y)|"
CONV = " || return self.conv(x)"
ROWS: dict[str, bool] = {
    FIRST + "return self.conv(x)": True,
    FIRST + "return self.second(x) || return self.conv(x)": True,
    "y = self.first(x)|return self.norm(y) || y = self.conv(x)|return y": True,
    "if x is None:|    y = self.first(x)|else:|    y = self.second(x)|return self.norm(y)" + CONV + CONV: True,
    "if x is None:|    y = self.first(x)|else:|    y = self.conv2(x)|return self.norm(y)" + CONV: False,
    FIRST + "if x is None:|    return self.first(x)|return self.conv(x)": True,
    FIRST + "if x is None:|    return self.conv2(x)|return self.conv(x)": False,
    FIRST + "return self.conv(x) + self.conv(x)": False,
    FIRST + "return self.relu(x)": False,
    FIRST + "return self.hidden(x)": False,
    FIRST + "return self.own(x)": False,
    FIRST + "return self.conv(x, 1)": False,
    FIRST + "return self.conv(input=x)": False,
    FIRST + "return self.conv(x, more=1)": False,
    FIRST + "pass": False,
    FIRST + "return": False,
    FIRST + "return x": False,
    FIRST + "return same(x)": False,
    FIRST + "y = self.conv(x)|return y + y": False,
    FIRST + "y = self.conv2(x)|return self.conv(x)": True,
    FIRST + "y = self.conv(x)|return self.conv(x)": False,
    FIRST + "locals()|return self.conv(x)": False,
    FIRST + "with torch.no_grad():|    return self.conv(x)": False,
    FIRST + "getattr(self, 'co' + 'nv')|return self.conv(x)": False,
    FIRST + "return self.conv(x) || return getattr(self, 'co' + 'nv')(x)": False,
    FIRST + "of = lambda self: self.relu|return self.conv(x)": False,
    FIRST + "of = lambda: x|return self.conv(x)": True,
    FIRST + "def of():|    return x|return self.conv(x)": True,
    "return self.norm(self.first(x)) + self.first(x)" + CONV: False,
    "return self.norm(self.norm(self.first(x)))" + CONV: False,
    "return self.norm(self.first(x)) + self.norm.weight" + CONV: False,
    "return self.norm(input=self.first(x))" + CONV: False,
    "return self.norm(self.first(x), 1)" + CONV: False,
    "return self.norm(self.first(x), more=1)" + CONV: False,
    "y = self.norm(checkpoint(forward, x))|return self.conv(x)": False,
    "n = self.norm|return n(self.first(x))" + CONV: False,
    "return self.norm(x)" + CONV: False,
    "y = self.first(x)|return self.norm(y) + y" + CONV: False,
    "y = self.first(x)|y += 1|return self.norm(y)" + CONV: False,
    "y = x|y = self.first(x)|return self.norm(y)" + CONV: False,
    "y, z = self.first(x)|return self.norm(y)" + CONV: False,
    "y = z = self.first(x)|return self.norm(y)" + CONV: False,
    "of = lambda y: 1|y = self.first(x)|return self.norm(y)" + CONV: False,
    INNER + "return self.norm(checkpoint(of, x))": True,
    INNER + "return self.norm(thinly(of, x))": True,
    INNER + "return self.norm(by_another(of, x))": False,
    INNER + "return self.norm(twice(of, x))": False,
    INNER + "return self.norm(either(of, x))": False,
    INNER + "return self.norm(inside(of, x))": False,
    INNER + "return self.norm(without(of, x))": False,
    INNER + "return self.norm(sums(of, x))": False,
    INNER + "return self.norm(same(of))": False,
    INNER + "return self.norm(print(of, x))": False,
    INNER + "return self.norm(checkpoint())": False,
    INNER + "return self.norm(checkpoint(same, x))": False,
    INNER + "return self.norm(checkpoint(of(x), x))": False,
    INNER + "y = of|return self.norm(checkpoint(of, x))": False,
    INNER + INNER + "return self.norm(checkpoint(of, x))": False,
    "@same|" + INNER + "return self.norm(checkpoint(of, x))": False,
}


class Parts(nn.Module):
    hidden = nn.Conv2d(3, 3, 1)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv2, self.relu, self.norm = (
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(3, 3, 1),
            nn.ReLU(),
            nn.BatchNorm2d(3),
        )
        self._modules["hidden"] = self._modules["own"] = self.conv
        self.__dict__["own"] = torch.neg


def methods(row: str, folder: Path) -> dict[str, Any]:
    """Methods with these bodies: their lines are separated by "|"."""
    text = HEAD
    for name, body in zip(("forward", "first", "second"), row.split(" || "), strict=False):
        text += f"    def {name}(self, x):\n" + "".join(f"        {line}\n" for line in body.split("|"))
    file = folder / "methods_by_their_words.py"
    file.write_text(text)
    return {name: one for name, one in vars(loaded(file).Written).items() if isinstance(one, types.FunctionType)}


@pytest.mark.parametrize("row", ROWS)
def test_what_flows_into_a_norm(row: str, tmp_path: Path) -> None:
    found = [*through_methods(Parts(), methods(row, tmp_path), ["norm"])]
    assert found == ([("conv", "norm")] if ROWS[row] else [])


def nowhere(self: Any, x: Tensor) -> Tensor:
    return x


nowhere.__code__ = nowhere.__code__.replace(co_filename="<nowhere>")


class Hides(Parts):
    norm = nn.BatchNorm2d(3)


class Own(Parts):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def own_method(parts: Parts, functions: dict[str, Any]) -> None:
    parts.__dict__["first"] = torch.neg


def own_norm(parts: Parts, functions: dict[str, Any]) -> None:
    parts.__dict__["norm"] = torch.neg


SPOILED: dict[str, tuple[type[Parts], Callable[[Parts, dict[str, Any]], object]]] = {
    "a method of its own": (Parts, own_method),
    "a norm of its own": (Parts, own_norm),
    "a norm that the class hides": (Hides, lambda parts, functions: None),
    "another __getattr__": (Own, lambda parts, functions: None),
    "a method without a source": (Parts, lambda parts, functions: functions.update(nowhere=nowhere)),
}


@pytest.mark.parametrize("what", SPOILED)
def test_modules_that_may_call_something_else(what: str, tmp_path: Path) -> None:
    (cls, spoil), functions = SPOILED[what], methods(FIRST + "return self.conv(x)", tmp_path)
    parts = cls()
    spoil(parts, functions)
    assert not [*through_methods(parts, functions, ["norm"])]
