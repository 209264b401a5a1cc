"""Models that ask for the class of what is swapped in them compute what they did: what disturbs is put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import LAUNCH, optimized
from models import randomised
from torch import Tensor, nn

import normswap
from normswap.proof import whole_model

X = torch.randn(3, 8)
QUIET = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x + self.linear(x)))


class Itself(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(x + self.linear(x)))
        return x if type(self) is Itself else x[:, :1]


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Any, Tensor], Any], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.block, self.last, self.ask = nn.LayerNorm(8), block(), nn.LayerNorm(8), ask

    def forward(self, x: Tensor) -> Any:
        return self.ask(self, x)


def plain(self: Any, x: Tensor) -> Tensor:
    return self.last(self.block(self.first(x)))


def raises(self: Any, x: Tensor) -> Tensor:
    if type(self.block) is not Block:
        raise TypeError(f"no block: {type(self.block)}")
    return plain(self, x)


def asserts(self: Any, x: Tensor) -> Tensor:
    assert self.last.__class__ is nn.LayerNorm
    return plain(self, x)


def in_a_table(self: Any, x: Tensor) -> Tensor:
    return {nn.LayerNorm: plain}[type(self.first)](self, x)


def skips_in_a_loop(self: Any, x: Tensor) -> Tensor:
    for child in self.children():
        if type(child) in (nn.LayerNorm, Block):
            x = child(x)
    return x


def raises_in_a_loop(self: Any, x: Tensor) -> Tensor:
    for child in self.children():
        if type(child) == nn.LayerNorm or type(child) == Block:  # noqa: E721
            x = child(x)
        else:
            raise NotImplementedError
    return x


def another_value(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) * (1 if type(self.block) is Block else 2)


def within_the_rounding(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) + (0 if type(self.block) is Block else 1e-7)


def by_the_parameters(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) if "x" in self.block.forward.__code__.co_varnames else x


def another_shape(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) if type(self.block) is Block else x[:1]


def no_tensor(self: Any, x: Tensor) -> Any:
    return plain(self, x) if type(self.last) is nn.LayerNorm else None


def beside_tensors(self: Any, x: Tensor) -> Any:
    return plain(self, x), {"exact": type(self.block) is Block}


def all_of_them(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) if nn.LayerNorm in (type(self.first), type(self.last)) else x


def of_one_class(self: Any, x: Tensor) -> Tensor:
    assert type(self.first) is type(self.last)
    return plain(self, x)


def by_name(self: Any, x: Tensor) -> Tensor:
    assert f"{type(self.block).__module__}.{type(self.block).__qualname__}" == f"{__name__}.Block"
    return plain(self, x) + len(f"{self.block}{type(self.block)}")


def instances(self: Any, x: Tensor) -> Tensor:
    assert isinstance(self.block, Block) and isinstance(self.first, nn.LayerNorm) and type(self) is Asking
    return plain(self, x)


ALL = ("first", "block", "block.norm", "last")


@pytest.mark.parametrize(
    ("ask", "put_back"),
    [
        *((raises, {"block"}), (asserts, {"last"}), (in_a_table, {"first"}), (another_value, {"block"})),
        *((skips_in_a_loop, {"first", "block", "last"}), (raises_in_a_loop, {"first", "block", "last"})),
        *((within_the_rounding, {"block"}), (another_shape, {"block"}), (no_tensor, {"last"})),
        *((beside_tensors, {"block"}), (all_of_them, {*ALL}), (of_one_class, {*()})),
        *((by_name, {*()}), (instances, {*()}), (by_the_parameters, {"block"})),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_what_the_model_asks_for_is_put_back(ask: Any, put_back: set[str], inplace: bool) -> None:
    model = randomised(Asking(ask)).eval()
    expected = model(X)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        swapped = normswap.optimize(model, X, inplace=inplace, on_empty="ignore")
    assert {*normswap.report(swapped).swapped} == {*ALL} - put_back
    found = swapped(X)
    assert str(found) == str(expected)
    assert [str(one.message).partition(":")[0] for one in told] == ["normswap"] * bool(put_back)
    for row in normswap.report(swapped).rows:
        if row["name"] in put_back:
            assert (row["status"], row["code"], row["swapped"]) == ("identity", "IDENTITY", False) and row["cure"]
            assert row["name"] in str(told[0].message) and row["reason"] in str(told[0].message)
            assert f"put back: {'first' if 'first' in put_back else row['name']}" in str(normswap.report(swapped))


def test_a_module_that_asks_for_its_own_class_is_put_back() -> None:
    model = randomised(Asking(plain, Itself)).eval()
    with pytest.warns(UserWarning, match="put back: block: the model asks"):
        swapped = normswap.optimize(model, X)
    torch.testing.assert_close(swapped(X), model(X))


@QUIET
def test_the_model_is_asked_again_where_a_plan_is_proved() -> None:
    model = randomised(Asking(another_value)).eval()
    expected = model(X)
    normswap.apply(model, normswap.plan(model), inplace=True)
    assert normswap.report(model).swapped == ALL and not torch.equal(model(X), expected)
    assert "block" not in normswap.validate(model, X).swapped and torch.equal(model(X), expected)


@QUIET
@pytest.mark.parametrize("validate", ["auto", "off"])
def test_what_is_timed_is_not_disturbed(validate: str) -> None:
    """Before anything is timed, and of what is left after it."""

    def costs(module: nn.Module, swapped: bool) -> tuple[float, float]:
        slow = module.normalized_shape == (8,) and module.eps == 1e-3 if isinstance(module, nn.LayerNorm) else None
        return LAUNCH, 0.0 if slow is None else 400.0 * (2 if slow == swapped else 1)

    for ask in (raises_in_a_loop, of_one_class):
        model = randomised(Asking(ask)).eval()
        model.last.eps = 1e-3
        swapped = optimized(model, X, costs, validate=validate)
        torch.testing.assert_close(swapped(X), model(X))
        assert not {"first", "last"} & {*normswap.report(swapped).swapped}


@QUIET
def test_a_model_that_never_gives_the_same_is_told_by_the_forms() -> None:
    noise = iter(range(1000))
    model = randomised(Asking(lambda self, x: plain(self, x) + next(noise))).eval()
    assert normswap.report(normswap.optimize(model, X)).swapped == ALL
    model.ask = lambda self, x: next(noise) + (plain(self, x) if type(self.last) is nn.LayerNorm else x[:1])
    assert normswap.report(normswap.optimize(model, X)).swapped == ALL[:3]


@pytest.mark.filterwarnings("error:.*put back.*")
@pytest.mark.filterwarnings("ignore:normswap. the whole model")
def test_a_model_whose_output_grows_from_run_to_run_does_not_ask() -> None:
    runs = iter(range(1000))
    model = randomised(Asking(lambda self, x: plain(self, torch.cat([x] * (next(runs) + 1))))).eval()
    assert normswap.report(normswap.optimize(model, X)).swapped == ALL


@QUIET
def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "MOST_RUNS", 6)
    model = randomised(nn.Sequential(*(nn.LayerNorm(8) for _ in range(64)))).eval()
    runs = []

    def forward(x: Tensor) -> Tensor:
        runs.append(1)
        assert all(type(model[i]) is nn.LayerNorm for i in range(0, 64, 4))
        return x

    found = identity_of(model, forward)
    assert {*found} >= {str(i) for i in range(0, 64, 4)} and len(runs) <= 1 + 6


@QUIET
def test_the_search_finds_them_by_halves() -> None:
    model = randomised(nn.Sequential(*(nn.LayerNorm(8) for _ in range(64)))).eval()
    assert identity_of(model, lambda x: x * sum(type(model[i]) is nn.LayerNorm for i in (5, 40))) == ["5", "40"]


def identity_of(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[str]:
    normswap.apply(model, normswap.plan(model), inplace=True)
    before = [type(module) for module in model.modules()]
    names = normswap.report(model).swapped
    found = whole_model.asked(model, names, lambda: forward(X))
    assert [type(module) for module in model.modules()] == before
    return found
