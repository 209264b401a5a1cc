"""What folds since its modules are called whole, what becomes an nn.Linear, and what running both tells."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import bn, conv, drawn
from torch import Tensor, nn
from uses_models import (
    Block,
    Taps,
    X,
    adding,
    folded,
    functions_in,
    norms,
)

import normswap
from normswap import folding
from normswap.uses import uses_in

# --- what becomes an nn.Linear ----------------------------------------------------------------------------------------


class Projection(nn.Module):
    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.width = nn.Linear(6, 6), nn.BatchNorm1d(6), 3

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.fc(x))

    def pre(self, x: Tensor) -> Any:
        return self.fc(x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.row = Projection(), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.parts = nn.ModuleList([Projection(), nn.Linear(6, 6)])
        self.other = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Any:
        return self.more(self.other(x)) + self.part(x) + self.row(x)

    def more(self, x: Tensor) -> Any:
        return x


class Looks:
    def at_attributes(self: Any, x: Any) -> Any:
        return x * self.part.heads * self.part.width

    def at_a_method(self: Any, x: Any) -> Any:
        return self.part.pre(x)

    def at_its_class(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.part, Projection) else 1)

    def at_its_type(self: Any, x: Any) -> Any:
        return x * (2 if type(self.part) is nn.Linear else 1)

    def at_its_length(self: Any, x: Any) -> Any:
        return x * len(self.row)

    def at_a_row(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.row, nn.Sequential) else 1)

    def in_a_loop(self: Any, x: Any) -> Any:
        return x * sum(isinstance(one, nn.Linear) for one in self.parts)

    def by_an_index(self: Any, x: Any) -> Any:
        return x * (self.row[0] is not None)


LOOKS = functions_in(Looks)


@pytest.mark.parametrize("name", LOOKS)
def test_a_whole_that_is_looked_at_stays(name: str) -> None:
    model, x = drawn(type("Looks", (Holds,), {"more": LOOKS[name]})), torch.randn(9, 6)
    made, told = folded(model)
    assert told and type(made.other) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)


# --- what is whole ----------------------------------------------------------------------------------------------------


def padding_of(convolution: Any) -> Any:
    return convolution.kernel_size[0] // 2 - convolution.padding[0]


class Whole:
    """Forwards that take nothing apart."""

    def by_a_geometry(self: Any, x: Any) -> Any:
        return self.bn(self.conv(F.pad(x, [padding_of(self.conv)] * 4)))

    def by_a_dtype(self: Any, x: Any) -> Any:
        x = x.to(self.row[0].weight.dtype).to(next(self.parameters()).device)
        return x * (self.rows[0][0].weight.shape[0] / 6)

    def by_questions(self: Any, x: Any) -> Any:
        if isinstance(self.row, nn.Sequential) and self.row[1] is not None and not hasattr(self, "nothing"):
            return x
        raise TypeError

    def by_a_computed_method(self: Any, x: Any, way: str = "whole") -> Any:
        return getattr(self, f"by_{way}_rows")(x)

    def by_whole_rows(self: Any, x: Any) -> Any:
        return self.rows[1](x)

    def by_a_method_that_calls_it(self: Any, x: Any) -> Any:
        return self.run(self.block, self.run(layer=self.row, x=x))

    def by_slices(self: Any, x: Any) -> Any:
        for row in self.rows[:1]:
            x = row(x)
        return x

    def by_lists(self: Any, x: Any) -> Any:
        layers = [self.row, *self.rows]
        for one in reversed(layers):
            x = one(x)
        return x

    def by_forward(self: Any, x: Any) -> Any:
        return self.row.forward(x)

    def by_what_is_kept(self: Any, x: Any) -> Any:
        return self.stages[0](x) + self.table["row"](x)

    def by_settings(self: Any, x: Any) -> Any:
        self.seen = x.shape
        return x if self.training else x + len(self.rows)

    def run(self: Any, layer: Any, x: Any) -> Any:
        return layer(x)


@pytest.mark.parametrize("name", [name for name in functions_in(Whole) if not name.startswith(("run", "by_whole"))])
def test_what_is_whole_folds(name: str) -> None:
    made = adding(vars(Whole)[name])
    model = drawn(lambda: type("Runs", (type(made()),), {"run": Whole.run, "by_whole_rows": Whole.by_whole_rows})())
    left = 0 if name == "by_a_geometry" else 1  # whose convolution and norm nobody calls
    folds, told = folded(model)
    assert not told and norms(folds) == left
    with torch.no_grad():
        torch.testing.assert_close(folds(X), model(X), rtol=1e-4, atol=1e-4)


def test_what_is_scripted_is_left() -> None:
    """A graph says what it computes."""
    row = nn.Sequential(conv(), bn()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(row, X)
    model = drawn(lambda: nn.Sequential(nn.Sequential(conv(), bn())))
    model.append(traced)  # type: ignore[operator]
    made, told = folded(nn.ModuleList([model]).eval()[0])
    assert not told and norms(made[0]) == 0
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


def by_a_function_that_is_kept(self: Any, x: Any) -> Any:
    return self.first_of_the_row(x)


def test_a_function_that_holds_the_model_is_no_copy() -> None:
    """What it calls is the model that it was made for: of a copy nothing is taken apart."""
    model = drawn(adding(by_a_function_that_is_kept))
    made, told = folded(model)
    expected = model(X)
    assert not told
    with pytest.warns(UserWarning, match=r"row\.1 is left"), pytest.raises(normswap.NormswapError, match="no module"):
        normswap.fold(model, inplace=True)
    with torch.no_grad():
        torch.testing.assert_close(made(X), expected, rtol=1e-4, atol=1e-4)


def test_synchronised_norms_fold() -> None:
    """In eval nothing is to be synchronised."""
    model = drawn(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(conv(), bn(), nn.ReLU(), Block())))
    made, told = folded(model)
    assert not told and not any(isinstance(one, nn.SyncBatchNorm) for one in made.modules())
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


# --- by running it ----------------------------------------------------------------------------------------------------


def test_with_inputs_it_is_compared() -> None:
    model = drawn(lambda: nn.Sequential(nn.Sequential(conv(), bn()), nn.Dropout(), Block()))
    state = torch.get_rng_state()
    made: Any = normswap.fold(model, X)
    assert norms(made) == 0 and torch.equal(torch.get_rng_state(), state)
    assert norms(normswap.fold(model, (X,))) == 0 and norms(normswap.fold(model, None, {"input": X})) == 0
    with torch.inference_mode():
        assert norms(normswap.fold(model, X)) == 0
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_not_seen_is_seen_by_running_it(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(model: nn.Module) -> Any:
        uses = uses_in(model)
        uses.apart.clear()
        uses.calls.clear()
        return uses

    monkeypatch.setattr(folding, "uses_in", blind)
    model = drawn(lambda: nn.Sequential(Taps(), nn.Sequential(conv(), bn())))
    assert norms(normswap.fold(model)) == 0
    before = model(X)
    with pytest.raises(normswap.NormswapError, match=r"differ by [0-9.e+-]+ of the largest in float64: code"):
        normswap.fold(model, X, inplace=inplace)
    assert norms(model) == 2 and torch.equal(model(X), before)


def test_what_stays_is_told_of_once() -> None:
    model = drawn(lambda: nn.Sequential(Taps(), Block()))
    with pytest.warns(UserWarning, match="is left as it is") as told:
        normswap.fold(model, X)
    assert len(told) == 1
