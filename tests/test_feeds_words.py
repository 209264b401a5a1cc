"""Which children a forward hands its first argument to, and does nothing else with it (regions.feeds), by the words of
its body."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from region_checks import loaded
from torch import nn

from normswap.regions import feeds
from normswap.regions.feeds import only_multiplies

HEAD = """
import torch

def same(function):
    return function

"""
BODIES: dict[str, str] = {
    "return self.fc(x)": "fc",
    "return self.fc(x) + self.fc2(x)": "fc fc2",
    "return self.fc(y)": "",
    "return x": "",
    "return self.fc(x) + x": "",
    "return self.fc(x, y)": "",
    "return self.fc(input=x)": "",
    "return self.fc(x, more=1)": "",
    "return self.fc(x.float())": "",
    "return y(x)": "",
    "return self.fc(x) * x.shape[0]": "fc",
    "return self.fc(x) * x.grad": "",
    "return self.fc(x).view(x.size(0), x.numel())": "fc",
    "return self.fc(x).view(x.size(x))": "",
    "return self.fc(x) + x.sum()": "",
    "h = self.fc(x)|return h + 1": "fc",
    "x = self.fc(x)|return x + x": "fc",
    "x: int = self.fc(x)|return x": "fc",
    "x: int|return self.fc(x)": "fc",
    "x: int|return self.fc(x) + x": "",
    "h: int = x|return self.fc(x)": "",
    "z: int = 1|return self.fc(x) + x": "",
    "self.fc(x)|return x": "",
    "x, z = y, self.fc(x)|return x + z": "fc",
    "x, z = y, x|return self.fc(z)": "",
    "z = 1|return self.fc(x) + x": "",
    "return self.fc(x)|return x": "fc",
    "if y:|    return self.fc(x)|return self.fc2(x)": "fc fc2",
    "if x.ndim > 1:|    return self.fc(x)|return self.fc2(x)": "fc fc2",
    "if x:|    return self.fc(x)|return self.fc2(x)": "",
    "if y:|    x = self.fc(x)|return x": "",
    "if y:|    x = self.fc(x)|else:|    x = self.fc2(x)|return x": "fc fc2",
    "if y:|    return self.fc(x)|else:|    x = self.fc(x)|return x": "fc",
    "self.seen = x|return self.fc(x)": "",
    "self.seen[x] = 1|return self.fc(x)": "",
    "x[0] = 1|return self.fc(x)": "",
    "x += 1|return self.fc(x)": "",
    "del x|return self.fc(y)": "",
    "for x in y:|    pass|return self.fc(x)": "",
    "for z in y:|    h = self.fc(x)|return h": "fc",
    "for z in y:|    h = x|return self.fc(x)": "",
    "with y:|    h = self.fc(x)|return h": "",
    "with y:|    pass|return self.fc(x)": "fc",
    "f = lambda: x|return self.fc(x)": "",
    "f = lambda z: z|return self.fc(x)": "fc",
    "def f():|    return x|return self.fc(x)": "",
    "return (x := self.fc(x))": "",
    "return (z := self.fc(x))": "fc",
    "return self.fc(x) + len(locals())": "",
    "h = torch.is_autocast_enabled()|return self.fc(x)": "",
    "return sum(self.fc(x) for z in y)": "",
    "return sum([self.fc(x) for z in y])": "fc",
    "yield self.fc(x)": "",
    "self.fc = y|return self.fc(x)": "",
    "self.fc.bias = y|return self.fc(x)": "",
    "del self.gate|return self.fc(x)": "",
    "h = self.fc(x)|self.seen = h|return h": "fc",
    "h = self.fc(x)|self.seen = h|return self.then(h)": "fc",
    "h = self.fc(x)|self.seen = h|return self.fc2(x)": "",
    "self.fc.to(y)|return self.fc(x)": "",
    "same(self)|return self.fc(x)": "",
    "h = self.fc(x)|return same(self)": "fc",
    "for z in y:|    h = self.fc(x)|    self.seen = h|return h": "",
}


def read(body: str, folder: Path, head: str = "def forward(self, x, y=None):") -> Any:
    file = folder / "feeds_by_their_words.py"
    lines = "".join(f"    {line}\n" for line in body.split("|"))
    file.write_text(HEAD + "".join(f"{line}\n" for line in head.split("|")) + lines)
    return loaded(file).forward


@pytest.mark.parametrize("body", BODIES)
def test_what_the_argument_is_handed_to(body: str, tmp_path: Path) -> None:
    assert feeds._read(read(body, tmp_path))[0] == {*BODIES[body].split()}


BEFORE: dict[str, str] = {
    "self.first()|return self.fc(x)": "first",
    "h = self.fc(x)|return self.then(h)": "",
    "return self.then(self.fc(x))": "",
    "return self.then(self.fc(x), self.fc2(x))": "fc fc2",
    "return self.fc(x) + self.then(y)": "fc then",
    "h = self.fc(x)|h = self.then(h)|return self.fc2(x)": "then fc2",
    "return [self.then(self.fc(x)) for z in y]": "then fc",
    "h = self.fc(x)|h = self.then(h)|return h": "",
    "same(y)|return self.fc(x)": "a_function",
    "f = self.then|f(y)|return self.fc(x)": "a_function",
    "return len(self.fc(x)) + same(y)": "a_function",
    "h = len(self.fc(x))|return same(h)": "",
    "h = self.then(self.fc(x))|return self.fc2(x)": "then fc2",
}


@pytest.mark.parametrize("body", BEFORE)
def test_what_may_be_called_before(body: str, tmp_path: Path) -> None:
    _, before = feeds._read(read(body, tmp_path))
    assert {name or "a_function" for name in before} - {"fc", "fc2"} == {*BEFORE[body].split()} - {"fc", "fc2"}


@pytest.mark.parametrize(
    ("head", "fed"),
    [
        ("def forward(self, x, /):", "fc"),
        ("def forward(self, *x):", ""),
        ("def forward(self):|    x = 1", ""),
        ("@same|def forward(self, x):", ""),
    ],
)
def test_other_signatures(head: str, fed: str, tmp_path: Path) -> None:
    assert feeds._read(read("return self.fc(x)", tmp_path, head))[0] == {*fed.split()}


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.fc(x) + self.conv(x)


class Calling(Feeding):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x)


class Hiding(Feeding):
    fc = nn.Linear(4, 4)


def with_own(name: str, value: Any) -> Feeding:
    child = Feeding()
    child.__dict__[name] = value
    return child


def hooked(module: nn.Module, child: nn.Module) -> nn.Module:
    child.register_forward_hook(lambda *_: None)
    return module


def test_who_only_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Feeding()
    assert only_multiplies(child) and only_multiplies(child.fc) and only_multiplies(child.conv)
    assert not any(map(only_multiplies, (None, nn.ReLU(), Calling(), Hiding(), nn.Sequential(nn.Linear(4, 4)))))
    assert not only_multiplies(with_own("fc", torch.relu)) and not only_multiplies(with_own("forward", torch.relu))
    for name in ("fc", "conv"):
        other = Feeding()
        other._modules[name] = nn.Identity()
        assert not only_multiplies(other)
        one = Feeding()
        assert not only_multiplies(hooked(one, getattr(one, name))) and not only_multiplies(hooked(one.fc, one.fc))
    assert not only_multiplies(hooked(one := Feeding(), one))
    monkeypatch.setattr(Feeding.forward, "__code__", (lambda self, x: self.fc(x) + x).__code__)
    assert not only_multiplies(child)
