"""What ``fold`` makes of example inputs, and of a model that it is to change itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import randomised
from test_fold import ActsBehind, JustTwo, sequential
from torch import Tensor, nn
from torch.nn.utils import prune

import normswap
from normswap.plans import NormswapError


class Masked(nn.Module):
    """Logits of which some are masked out, and what is no tensor."""

    def __init__(self, *masks: float) -> None:
        super().__init__()
        self.body, self.masks = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), masks

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return [x.index_fill(1, torch.tensor([at]), mask) for at, mask in enumerate(self.masks)], "logits"


@pytest.mark.parametrize("masks", [(float("-inf"),), (float("inf"), float("nan")), (1e300, float("inf"))])
def test_outputs_that_are_not_finite_compare_where_they_are_the_same(masks: tuple[float, ...]) -> None:
    model, x = randomised(Masked(*masks)).eval(), torch.randn(9, 6)
    folded: Any = normswap.fold(model, x)
    assert type(folded.body) is nn.Linear


class Unbatched(nn.Module):
    """Computes ``of`` what another function is when it is folded: BatchNorm1d takes (C, L) for (N, C)."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.of = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), of

    def forward(self, x: Tensor) -> Any:
        return self.of(self.body(x))


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (lambda y: y, "its outputs would differ by"),
        (lambda y: torch.complex(y * 0, y), "its outputs would differ by"),
        (lambda y: y.log(), "its outputs would differ by nan"),
        (lambda y: 1 / y.relu(), "its outputs would differ by inf"),
        (lambda y: y / 0, "Unbatched gives no tensor with a finite number on these inputs"),
        (lambda y: y[:0], "Unbatched gives no tensor with a finite number on these inputs"),
        (lambda y: y.tolist(), "Unbatched gives no tensor with a finite number on these inputs"),
        (lambda y: y.to("meta"), "Unbatched gives no tensor with a finite number on these inputs"),
    ],
)
def test_outputs_that_differ_or_say_nothing_are_refused(of: Callable[[Tensor], Any], told: str) -> None:
    with pytest.raises(NormswapError, match=told):
        normswap.fold(randomised(Unbatched(of)).eval(), torch.randn(3, 4))


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Sequential(*sequential(), nn.ReLU()), nn.BatchNorm1d(6)
        self.whole, self.pair = JustTwo(), ActsBehind()

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.whole(self.norm(torch.relu(self.body(x)))))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("error")
def test_in_place_a_warning_that_is_an_error_changes_nothing() -> None:
    model = randomised(Alone()).eval()
    before = [*model.named_modules()]
    with pytest.raises(UserWarning, match=r"fold: 1 BatchNorms stay \(norm\)"):
        normswap.fold(model, inplace=True)
    assert [*model.named_modules()] == before


def test_a_model_that_cannot_be_copied_is_folded_in_place_without_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)).eval()
    prune.l1_unstructured(model[3], "weight", 0.5)
    x = torch.randn(2, 3, 5, 5)
    expected = model(x)
    with pytest.raises(NormswapError, match=r"cannot be copied .*: fold it without example inputs"):
        normswap.fold(model, x, inplace=True)
    assert isinstance(model[1], nn.BatchNorm2d)
    torch.testing.assert_close(normswap.fold(model, inplace=True)(x), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"example_inputs": [torch.randn(2, 3)]}, r"example_inputs must be a tensor or a tuple .*, got list"),
        ({"example_kwargs": "x"}, "example_kwargs must be a dict, got str"),
    ],
)
def test_example_inputs_are_of_the_kind_that_optimize_takes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        normswap.fold(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), **given)
