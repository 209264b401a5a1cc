"""What regions.straight reads of a forward, by the words of its body: the operations of each way, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from region_checks import loaded
from torch import nn

from normswap.attributes import Rejection
from normswap.regions.flow import Constant, is_literal
from normswap.regions.straight import Straight, names_of, straight

HEAD = """
import torch
from math import sqrt
from torch.nn.functional import leaky_relu

def halved(x):
    "A docstring."
    return x / 2

def scaled(x, by=2.0):
    return x * by

def by_keyword(x, *, by=2.0):
    return x * by

def nothing():
    return 2.0

def same(function):
    return function

@same
def decorated(x):
    return x / 2
"""
REFUSED = "refused"
BRANCHES = {
    "self.on": "abs",
    "not self.on": "relu",
    "not self.off": "abs",
    "self.on_class": "abs",
    "self.hidden": REFUSED,
    "self.options": REFUSED,
    "self.weight": REFUSED,
    "self.weight.dtype": REFUSED,
    "x.dtype": REFUSED,
    "x": REFUSED,
    "x is None": REFUSED,
    "x.ndim == 1": REFUSED,
    "self.on and self.off": "relu",
    "self.off or self.on": "abs",
    "self.off or self.off": "relu",
    "self.nothing is None": "abs",
    "self.nothing": "relu",
    "self.weight is None": "relu",
    "self.weight is not None": "abs",
    "None is self.weight": "relu",
    "None is not self.weight": "abs",
    "self.weight == None": "relu",
    "self.weight != None": "abs",
    "self.weight is self.on": REFUSED,
    "self.on is self.weight": REFUSED,
    "self.name == 'one'": "abs",
    "self.name in ('one', 'two')": "abs",
    "self.name not in ['one']": "relu",
    "self.name in {'two'}": "relu",
    "self.name in (self.weight, 'one')": REFUSED,
    "self.name in self.nothing": REFUSED,
    "self.name > 'a'": REFUSED,
    "'a' < self.name < 'z'": REFUSED,
    "x.dtype is torch.float16": "abs | relu",
    "torch.float16 == self.weight.dtype": "abs | relu",
    "x.dtype in (torch.float16, torch.bfloat16)": "abs | relu",
    "torch.float16 in (torch.float16, self.weight.dtype)": "abs | relu",
    "(x.dtype, 1) == (torch.float16, 1)": "abs | relu",
    "self.training": "abs | relu",
    "self.training and not self.training": "relu | relu",
}
BODIES = {
    "return halved(x)": "/",
    "return scaled(x)": "*",
    "return scaled(x, by=3)": "*",
    "return scaled(x, 3, 4)": REFUSED,
    "return by_keyword(x)": REFUSED,
    "return x * nothing()": REFUSED,
    "return decorated(x)": REFUSED,
    "halved = torch.abs|return halved(x)": REFUSED,
    "return leaky_relu(x)": "leaky_relu",
    "return sqrt(x)": REFUSED,
    "return self.static(x)": "self.static",
    "return self.elsewhere(x)": "halved",
    "return self.along(x)": "abs",
    "y = z = x + 1|return y * z": "+ *",
    "'Nothing.'|return torch.abs(x)": "abs",
    "return y + x|y = x": REFUSED,
    "return x[:, None] + 1": "+",
    "return x[..., :] + 1": "+",
    "return x[0] + 1": REFUSED,
    "return x[:, -1] + 1": REFUSED,
}


class Base(nn.Module):
    on_class = True
    static = staticmethod(torch.abs)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.on, self.off, self.nothing, self.name, self.options = True, False, None, "one", [1]
        self.__dict__["hidden"] = True

    @property
    def hidden(self) -> bool:
        return False

    def elsewhere(self, x: Any) -> Any:
        return halved(x)  # which is another one where forward is

    def along(self, x: Any) -> Any:
        return torch.abs(x)


def halved(x: Any) -> Any:
    return x / 2


def read(body: str, folder: Path) -> Straight | Rejection:
    """What is read of a forward with these lines, separated by "|"."""
    file = folder / "straight_by_its_words.py"
    file.write_text(f"{HEAD}\ndef forward(self, x):\n" + "".join(f"    {line}\n" for line in body.split("|")))
    forward = loaded(file).forward
    return straight(type("Written", (Base,), {"forward": forward})(), forward)


def told(found: Straight | Rejection) -> str:
    return REFUSED if isinstance(found, Rejection) else " | ".join(" ".join(names_of(way.ops)) for way in found.ways)


@pytest.mark.parametrize("condition", BRANCHES)
def test_which_way_a_branch_goes(condition: str, tmp_path: Path) -> None:
    statement = f"if {condition}:|    return torch.abs(x)|return torch.relu(x)"
    for body in (statement, f"return torch.abs(x) if {condition} else torch.relu(x)"):
        found = read(body, tmp_path)
        assert told(found).replace(".dtype ", "") == BRANCHES[condition]
        if isinstance(found, Rejection):
            assert found.detail.startswith("a branch on ")


@pytest.mark.parametrize("body", BODIES)
def test_what_a_body_computes(body: str, tmp_path: Path) -> None:
    assert told(read(body, tmp_path)) == BODIES[body]


def test_what_the_operations_are_of(tmp_path: Path) -> None:
    for body, number in (("return scaled(x)", 2.0), ("by = 3|return x * by", 3)):
        found = read(body, tmp_path)
        assert isinstance(found, Straight)
        (way,) = found.ways
        one, by = way.ops[0].args
        assert one is way.argument and isinstance(by, Constant) and by.value == number and is_literal(by)


def test_a_refusal_of_a_whole_function_names_no_line(tmp_path: Path) -> None:
    found = read("x = x + 1", tmp_path)
    assert isinstance(found, Rejection) and found.detail == "forward does not end in a return"
