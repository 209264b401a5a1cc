"""What a forward's conditions on its own module say, and what its attributes are."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

from normswap.regions.owner import Owner


class Held(nn.Module):
    common = True

    def __init__(self) -> None:
        super().__init__()
        self.on, self.off, self.number, self.nothing = True, False, 3, None
        self.child, self.weight = nn.Identity(), nn.Parameter(torch.ones(2))
        self.register_buffer("empty", None)

    def method(self) -> bool:
        return True

    @property
    def computed(self) -> bool:
        return True


def owner(body: str = "pass", module: nn.Module | None = None) -> Owner:
    (tree,) = ast.parse(f"def forward(self, x):\n    {body}").body
    assert isinstance(tree, ast.FunctionDef)
    return Owner(module or Held(), tree, "self")


def expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("test", "truth"),
    [
        ("self.on", True),
        ("self.off", False),
        ("not self.off", True),
        ("self.nothing is None", True),
        ("self.nothing is not None", False),
        ("self.child is None", False),
        ("self.weight is not None", True),
        ("self.empty is None", True),
        ("self.number", None),
        ("self.child", None),
        ("self.missing", None),
        ("self.missing is None", None),
        ("self.common", None),
        ("self.computed", None),
        ("self.training", None),
        ("self.child.training", None),
        ("x is None", None),
        ("not x", None),
        ("x", None),
        ("other.on", None),
        ("self.on == True", None),
        ("self.on is True", None),
    ],
)
def test_what_a_condition_says_now(test: str, truth: bool | None) -> None:
    assert owner().decided(expression(test)) is truth


@pytest.mark.parametrize(
    ("body", "truth"),
    [
        ("return self.child(x) + self.weight", True),
        ("self.on = x", None),
        ("self.method()", None),
        ("return helper(self)", None),
        ("y = self", None),
        ("del self.on", None),
    ],
)
def test_a_forward_that_may_change_its_module_decides_nothing(body: str, truth: bool | None) -> None:
    assert owner(body).decided(expression("self.on")) is truth


def test_what_its_attributes_are() -> None:
    held = Held()
    known = owner(module=held)
    assert known.is_tensor(expression("self.weight.data"))
    assert not any(known.is_tensor(expression(text)) for text in ("self.weight", "self.on.data", "x.weight.data"))
    held.__dict__["weight"] = 1.0
    assert not known.is_tensor(expression("self.weight.data"))
    assert known.is_computed("computed") and known.is_computed("method") and not known.is_computed("on")
    assert not known.is_computed("child.weight") and known.is_computed("child.forward")
    assert known.is_path(expression("self.child.weight")) and not known.is_path(expression("x.child"))
    assert known.as_condition(expression("me.on is not None")) == "self.on is not None"
