"""The proof of a whole model: which inputs, what a model may do while it runs, and the comparison end to end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import L1, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import modules

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Make every swapped LayerNorm have the given forward."""

    def planted(forward: Any) -> None:
        wrong = type("Wrong", (modules.LayerNorm,), {"forward": forward})
        monkeypatch.setitem(modules._MODULE_CLASSES, nn.LayerNorm, ("layer_norm", wrong))

    return planted


def a_little_off(self: nn.LayerNorm, input: Tensor) -> Tensor:
    return 1.001 * F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class Runs(nn.Module):
    """A LayerNorm and whatever a test wants to happen besides."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.norm = randomised(nn.LayerNorm(8))
        self.seen: list[int] = []
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def rows(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in normswap.report(model).rows}


def test_a_model_that_keeps_state_in_attributes_is_left_as_it_was() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        self.seen.append(1)
        self.cache["x"] = self.last = self.fresh = x
        return self.norm(x)

    model = Runs(run).eval()
    model.seen.append(7)
    normswap.optimize(model, torch.randn(2, 8), inplace=True)
    assert model.seen == [7] and model.cache == {} and model.last is None and not hasattr(model, "fresh")
    model(torch.ones(2, 8))
    assert model.seen == [7, 1]


def test_an_error_of_the_model_says_that_it_was_the_original() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        raise ArithmeticError("in the middle")

    with pytest.raises(ArithmeticError, match="in the middle") as caught:
        normswap.optimize(Runs(run).eval(), torch.randn(2, 8))
    if hasattr(caught.value, "add_note"):
        assert "the ORIGINAL model" in caught.value.__notes__[0]


def test_a_site_whose_swap_raises_is_put_back_alone(plant: Callable[[Any], None]) -> None:
    def raises(self: Any, input: Tensor) -> Tensor:
        raise RuntimeError("launch failed")

    plant(raises)
    model = nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8)).eval()
    for x in (torch.randn(4, 8), None):
        with pytest.warns(UserWarning, match=r"put back: 0 \(layer_norm\): raises RuntimeError: launch failed"):
            swapped = normswap.optimize(model, x)
        assert type(swapped[0]) is nn.LayerNorm and type(swapped[1]) is modules.GroupNorm


def test_a_site_that_fails_later_is_put_back_without_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = randomised(Projection(8, 6)).train(), torch.randn(16, 8)
    swapped = normswap.optimize(model, x)
    assert normswap.report(swapped).swapped == ("", "bn")
    pipeline = sys.modules["normswap.pipeline"]
    real = pipeline.prove
    failing = lambda *given: [replace(p, status="wiring" if p.name else "failed") for p in real(*given)]  # noqa: E731
    monkeypatch.setattr(pipeline, "prove", failing)
    report = normswap.validate(swapped, x)
    assert type(swapped) is Projection and modules.site_match(swapped.bn) is not None
    assert report.swapped == ("bn",) == tuple(swap.site.name for swap in report.plan.swaps)


class L1AlongTwo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=2, keepdim=True)


class L1FromTheEnd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=-3, keepdim=True)


@pytest.mark.parametrize("make", (L1AlongTwo, L1FromTheEnd, L1))
def test_made_up_inputs_have_the_dimension_normalised(make: Callable[[], nn.Module]) -> None:
    (row,) = rows(normswap.optimize(make())).values()
    assert (row["status"], row["inputs"]) == ("wiring", "synthesised")


def test_a_site_that_the_run_does_not_reach_gets_made_up_inputs() -> None:
    model = Runs(lambda self, x: self.norm(x)).eval()
    model.unused = randomised(nn.GroupNorm(2, 4))
    found = rows(normswap.optimize(model, torch.randn(2, 8)))
    assert {name: row["inputs"] for name, row in found.items()} == {"norm": "captured", "unused": "synthesised"}


def test_every_call_of_a_site_counts(plant: Callable[[Any], None]) -> None:
    def wrong_when_large(self: Any, input: Tensor) -> Tensor:
        out = F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return out * 1.01 if input.abs().max() > 50 else out

    plant(wrong_when_large)
    model = Runs(lambda self, x: self.norm(x) + self.norm(x * 100)).eval()
    with pytest.warns(UserWarning, match="put back: norm"):
        normswap.optimize(model, torch.randn(4, 8))


@pytest.mark.case("no-grad-inference")
def test_inside_inference_mode_and_for_a_model_made_in_it() -> None:
    with torch.inference_mode():
        made = normswap.optimize(randomised(nn.LayerNorm(8)), torch.randn(2, 8))
    assert rows(made)[""]["gradients"]
    made(torch.randn(2, 8)).sum().backward()
    assert made.weight.grad is not None


@pytest.mark.parametrize("kind", ("layer_norm", "linear_scale_batch_norm"))
@pytest.mark.case("autocast")
def test_under_autocast(kind: str) -> None:
    model = randomised(nn.LayerNorm(8) if kind == "layer_norm" else Projection(8, 4)).train()
    with torch.autocast("cpu", torch.bfloat16):
        swapped = normswap.optimize(model, torch.randn(12, 8))
    for row in rows(swapped).values():
        assert row["status"] == "wiring" and row["eager_error_share"] <= 1.0, row


@pytest.mark.case("meta-device")
def test_a_meta_model_is_swapped_without_being_run() -> None:
    swapped = normswap.optimize(nn.Sequential(nn.LayerNorm(8, device="meta")).eval(), torch.randn(2, 8))
    assert rows(swapped)["0"]["status"] == "unchecked" and normswap.report(swapped).model is None


@dataclass
class Output:
    y: Tensor
    also: list[Tensor]


@pytest.mark.parametrize(
    "run",
    (
        lambda self, x: Output(self.norm(x), []),
        lambda self, x: {"deep": [Output(x, [self.norm(x)])]},
        lambda self, x: (x * 1e9, self.norm(x)),
    ),
)
def test_the_whole_model_is_compared_in_every_output(run: Any, plant: Callable[[Any], None]) -> None:
    plant(a_little_off)
    model = Runs(run).eval()
    with pytest.warns(UserWarning, match="the whole model: its output moved by"):
        swapped = normswap.optimize(model, torch.randn(4, 8), on_mismatch="warn")
    whole = normswap.report(swapped).model
    assert whole is not None and not whole["passed"] and 1e-4 < whole["max_error"] < 1e-2


def test_an_output_without_tensors_is_not_passed_silently() -> None:
    model = Runs(lambda self, x: float(self.norm(x).sum())).eval()
    with pytest.warns(UserWarning, match="holds no tensor"):
        swapped = normswap.optimize(model, torch.randn(4, 8))
    assert normswap.report(swapped).swapped == ("norm",)
    assert "NOT WITHIN IT" not in str(normswap.report(swapped))


def test_an_output_whose_shape_hangs_on_the_last_bit_is_no_error() -> None:
    model = Runs(lambda self, x: x.flatten()[: 1 + int(self.norm(x).view(torch.int32).sum()) % 31]).eval()
    with pytest.warns(UserWarning, match="changes its shape"):
        normswap.optimize(model, torch.randn(4, 8))


@pytest.mark.parametrize("other", (lambda out: out.double(), lambda out: out[:, None]))
def test_the_whole_model_keeps_shapes_and_dtypes(other: Any, plant: Callable[[Any], None]) -> None:
    plant(lambda self, input: other(F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)))
    with pytest.warns(UserWarning, match="other shapes or dtypes"):
        swapped = normswap.optimize(Runs(lambda self, x: self.norm(x)).eval(), torch.randn(4, 8), on_mismatch="warn")
    whole = normswap.report(swapped).model
    assert whole is not None and not whole["passed"]


def test_a_region_whose_children_have_gone_is_not_made_up() -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.GroupNorm(2, 4), nn.ReLU())

    for change in (lambda model: model.pop(-1), lambda model: model.__setitem__(2, nn.Tanh())):
        swapped: Any = normswap.optimize(made().eval(), torch.randn(2, 4, 3))
        change(swapped)
        (row,) = [row for row in normswap.validate(swapped, torch.randn(2, 4, 3)).rows if row["kind"] == "region"]
        assert row["status"] == "wiring"
