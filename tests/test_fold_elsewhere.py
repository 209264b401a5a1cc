"""Folding leaves what code takes by an index, in a loop or through another module; what is called whole it folds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from convolution_models import Block, bn, conv, drawn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workloads import LinearScaleBatchNorm

import normswap

X = torch.randn(2, 6, 5, 5)


class Model(nn.Module):
    """A convolution and its norm in a row, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn(), nn.ReLU())
        self.block = Block(conv(), bn())
        del self.block.bn2
        self.rows = nn.ModuleList([nn.Sequential(conv(), bn()), nn.Sequential(conv(), bn())])
        self.named = nn.ModuleDict({"one": nn.Sequential(conv(), bn())})

    def whole(self, x: Tensor) -> Tensor:
        x = self.block(self.row(x))
        for row in self.rows:
            x = row(x)
        return self.named["one"](x)

    def run(self, layer: Any, x: Tensor) -> Any:
        """By somebody else."""
        return layer[0](x)


def goes_through(self: Any, x: Tensor) -> Any:
    taps = []
    for layer in self.row:
        x = layer(x)
        taps.append(x)
    return self.whole(x) + sum(taps)


def by_numbers(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.row[0](x)


def by_slices(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.row[1:](self.row[:1](x))


def by_children(self: Any, x: Tensor) -> Any:
    first, *_ = self.row.children()
    return self.whole(x) + first(x)


def by_modules(self: Any, x: Tensor) -> Any:
    return self.whole(x) + next(one for _, one in self.row._modules.items())(x)


def by_another_name(self: Any, x: Tensor) -> Any:
    row = self.row
    layers = [layer for layer in row]  # noqa: C416
    return self.whole(x) + layers[0](x)


def a_statistic(self: Any, x: Tensor) -> Any:
    return self.whole(x) * self.row[1].running_mean.sum()


def handed_on(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.run(self.row, x)


def of_a_block(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.block.conv(x)


def of_a_block_by_getattr(self: Any, x: Tensor) -> Any:
    block = getattr(self, "block")  # noqa: B009
    return self.whole(x) + getattr(block, "conv")(x)  # noqa: B009


def in_a_loop_within(self: Any, x: Tensor) -> Any:
    found = self.whole(x)
    for row in self.rows:
        for layer in row:
            x = layer(x)
            found = found + x
    return found


def of_one_by_name(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.named["one"][0](x)


OF_THE_ROW = (goes_through, by_numbers, by_slices, by_children, by_modules, by_another_name, a_statistic, handed_on)
LEFT: dict[Callable[..., Any], set[str]] = {
    **{forward: {"row.1"} for forward in OF_THE_ROW},
    **{forward: {"block.bn"} for forward in (of_a_block, of_a_block_by_getattr)},
    in_a_loop_within: {"rows.0.1", "rows.1.1"},
    of_one_by_name: {"named.one.1"},
}
"""What stays of the norms."""


def asks_what_it_is(self: Any, x: Tensor) -> Any:
    if isinstance(self.row, nn.Sequential) and len(self.rows) == 2 and self.row is not None:
        return self.whole(x[:1])
    raise TypeError


def by_checkpoints(self: Any, x: Tensor) -> Any:
    return self.whole(checkpoint(self.row, x, use_reentrant=False))


def by_computed_names(self: Any, x: Tensor) -> Any:
    for name in ("row", "block"):
        x = getattr(self, name)(x)
    return self.whole(x)


def in_loops(self: Any, x: Tensor) -> Any:
    for index, (one, row) in enumerate(zip(self.named.values(), self.rows, strict=False)):
        x = row(one(x)) + index
    return self.whole(self.rows[-1](x))


FOLDED: tuple[Callable[..., Any], ...] = (asks_what_it_is, by_checkpoints, by_computed_names, in_loops, Model.whole)


def fold(forward: Any) -> tuple[nn.Module, nn.Module, set[str]]:
    """The model, it folded, and the norms that stay, each with a warning."""
    model = drawn(type("Written", (Model,), {"forward": forward}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = normswap.fold(model)
    left = {name for name, one in made.named_modules() if isinstance(one, nn.BatchNorm2d)}
    assert {str(one.message).split(" is left as it is")[0] for one in told} == {f"fold: {name}" for name in left}
    assert all("called elsewhere too" in str(one.message) for one in told)
    return model, made, left


@pytest.mark.parametrize("forward", [*LEFT, *FOLDED], ids=lambda forward: forward.__name__)
def test_what_is_called_apart_stays(forward: Any) -> None:
    model, made, left = fold(forward)
    assert left == LEFT.get(forward, set())
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


class Tapped(nn.Module):
    """A region, and a tap of the row before it."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.norm = nn.Sequential(conv(), bn(), nn.ReLU()), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.norm(self.row(x))) + self.row[0](x)


def test_of_a_swapped_model_the_code_is_read_as_it_was_written() -> None:
    model = drawn(lambda: nn.Sequential(Tapped(), Block(conv(), bn())))
    swapped = normswap.apply(model, normswap.plan(model))
    assert type(swapped[0]) is not Tapped
    with pytest.warns(UserWarning, match=r"0\.row\.1 is left as it is: .* elsewhere too"):
        made = normswap.fold(swapped)
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


def by_its_path(self: Any, x: Tensor) -> Any:
    return self.whole(x) + self.get_submodule("block.conv")(x)


def test_nothing_is_folded_where_anything_may_be_called() -> None:
    with pytest.warns(UserWarning, match="called elsewhere too"), pytest.raises(normswap.NormswapError):
        normswap.fold(drawn(type("Written", (Model,), {"forward": by_its_path})))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = LinearScaleBatchNorm(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part.gemm(x)


def test_a_linear_that_another_module_calls_stays() -> None:
    model = drawn(lambda: nn.Sequential(Scaled(), LinearScaleBatchNorm(4, 3)))
    with pytest.warns(UserWarning, match=r"0\.part is left as it is: .* elsewhere too"):
        made: Any = normswap.fold(model)
    assert type(made[0].part) is LinearScaleBatchNorm and type(made[1]) is nn.Linear
    x = torch.randn(5, 6)
    torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)


class Unless(nn.Module):
    """As MobileViT's layers: a norm that may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = conv(), bn(), None

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        if self.bn is not None:
            x = self.bn(x)
        return x if self.act is None else self.act(x)


class Adapts(nn.Module):
    """Goes through all modules, of which it calls none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Unless()

    def forward(self, x: Tensor) -> Any:
        self.adapt()
        return self.body(x)

    def adapt(self) -> None:
        for _, module in self.named_modules():
            if isinstance(module, nn.ModuleList):
                module.adapt()


def test_questions_are_no_calls() -> None:
    model = drawn(Adapts)
    made: Any = normswap.fold(model)
    assert type(made.body.bn) is nn.Identity
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)
