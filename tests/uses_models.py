"""A model whose parts code may take apart, and what is made of it."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from convolution_models import bn, conv
from torch import Tensor, nn

import normswap

X = torch.randn(2, 6, 5, 5)


class AttributeDict(dict):  # type: ignore[type-arg]
    """As many configurations are: asked for anything it is no name of, it raises a KeyError."""

    __getattr__ = dict.__getitem__


class Block(nn.Module):
    config = AttributeDict(scale=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), bn()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x))) * self.config.scale

    def pre(self, x: Tensor) -> Any:
        return self.conv(x)

    @property
    def first(self) -> Any:
        return self.conv


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.block = nn.Sequential(conv(), bn(), nn.ReLU()), Block()
        self.rows = nn.ModuleList([nn.Sequential(conv(), bn()), nn.Sequential(conv(), bn())])
        self.stages, self.table = [self.row], {"row": self.row}
        self.dispatch: dict[str, Any] = {"a": self.run_a}
        self.first_of_the_row = lambda x: self.row[0](x)
        self.partly = functools.partial(of_the_net, self)
        self.conv, self.bn = conv(), bn()

    def whole(self, x: Tensor) -> Any:
        x = self.block(self.row(x))
        for row in self.rows:
            x = row(x)
        return x

    def run_a(self, x: Tensor) -> Any:
        return self.row[0](x)

    @property
    def head(self) -> nn.Module:
        return self.row[0]

    @property
    def kernel(self) -> Any:
        return self.conv.weight

    @staticmethod
    def stat(stem: Any, x: Tensor) -> Any:
        return stem[0](x)

    def each(self, rows: Any, x: Tensor) -> Any:
        return sum(row[0](x) for row in rows)


def of_the_net(net: Any, x: Tensor) -> Any:
    return net.row[0](x)


def of_rows(rows: Any, x: Tensor) -> Any:
    return sum(row[0](x) for row in rows)


def adding(function: Any) -> Callable[[], nn.Module]:
    def forward(self: Any, x: Tensor) -> Any:
        return self.whole(x) + self.more(x)

    return lambda: type("Written", (Model,), {"forward": forward, "more": function})()


class Taps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn(), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        taps = []
        for one in self.row:
            x = one(x)
            taps.append(x)
        return sum(taps)


def functions_in(cls: type) -> dict[str, Any]:
    return {name: one for name, one in vars(cls).items() if isinstance(one, types.FunctionType)}


def folded(model: nn.Module) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            made = normswap.fold(model)
        except normswap.NormswapError:
            made = model
    return made, [text for one in told if "is left as it is" in (text := str(one.message))]


def norms(model: nn.Module) -> int:
    return sum(isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d) for one in model.modules())


def assert_part_stays(model: nn.Module) -> None:
    """Folded it computes the same, and what was not is told of."""
    made, told = folded(model)
    assert told, "nothing stayed"
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)
