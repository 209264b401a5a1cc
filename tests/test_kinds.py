"""What the files of the kinds say of themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normswap
from normswap import ops
from normswap.kinds import KINDS, NORMS, kind_of, magnitudes, sample
from normswap.kinds.kind import are_numbers, flat, is_along, shape_along
from normswap.modules import swapped_class
from normswap.plans import Match, PlanError

VECTOR = torch.ones(6)


class L1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps: Any = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.abs().mean(1, keepdim=True) + self.eps)


def test_a_kind_by_its_name() -> None:
    assert kind_of(Match("layer_norm")) is NORMS["layer_norm"]
    assert kind_of(Match("l1_norm", {"dim": 1})) is KINDS["l1_norm"]
    assert kind_of(Match("rms_norm")) is NORMS["rms_norm"]
    assert kind_of(Match("rms_norm", {"dim": -1, "eps": 1e-6})) is KINDS["rms_norm_by_hand"]
    with pytest.raises(PlanError, match="kind 'another' is not one of .*layer_norm.*l2_norm"):
        kind_of(Match("another"))


@pytest.mark.parametrize(
    ("dim", "parameter", "shape"),
    [
        (-1, None, (3, 4, 33)),
        (1, None, (3, 33, 5)),
        (3, None, (3, 4, 5, 33)),
        (-4, None, (33, 4, 5, 6)),
        (None, None, (3, 4, 33)),
        (-1, VECTOR, (3, 4, 6)),
        (1, VECTOR, (3, 6)),
        (1, VECTOR[:, None, None], (3, 6, 5, 6)),
        (1, VECTOR[None, :, None, None], (3, 6, 5, 6)),
        (2, VECTOR[:1], (3, 4, 1)),
    ],
)
def test_shapes_on_which_a_parameter_broadcasts(dim: Any, parameter: Any, shape: tuple[int, ...]) -> None:
    assert shape_along(dim, parameter) == shape
    if parameter is not None:
        assert (torch.zeros(shape) * parameter).shape == shape


def test_what_stands_for_dims_and_numbers() -> None:
    x = torch.zeros(2, 6)
    assert is_along(x, 1) and is_along(x, -2) and is_along(x, 0)
    assert not any(is_along(x, dim) for dim in (2, -3, True, None, 1.0, (1,)))
    assert are_numbers(1, 2.0, None) and not are_numbers(True) and not are_numbers(torch.tensor(1.0))


def test_a_parameter_as_a_vector() -> None:
    x = torch.zeros(2, 6, 3, dtype=torch.float16)
    assert flat(None, x, 1) is None
    for parameter in (VECTOR[:, None], VECTOR[None, :, None], VECTOR[:, None].half()):
        assert flat(parameter, x, 1).shape == (6,)  # type: ignore[union-attr]
    for wrong in (VECTOR[:, None].bfloat16(), VECTOR, VECTOR[:3, None], torch.ones(1), torch.ones(2, 6, 1)):
        with pytest.raises(ValueError, match="is not one value per index|beside"):
            flat(wrong, x, 1)


def test_samples_are_of_the_parameters() -> None:
    standardize, centre = KINDS["weight_standardization"], KINDS["layer_norm_by_hand"]
    assert standardize.sample(None, None, 0.1, 1e-5) == (1, 5, 33)
    assert standardize.sample(VECTOR, None, 0.1, 1e-5) == standardize.sample(None, VECTOR, 0.1, 1e-5) == (1, 6, 33)
    assert centre.sample(-1, 1e-5, VECTOR, None) == centre.sample(-1, 1e-5, None, VECTOR) == (3, 4, 6)
    assert sample(Match("l1_norm", {"dim": "axis"}), SimpleNamespace(axis=1)) == (3, 33, 5)  # type: ignore[arg-type]


def test_which_instances_are_sites_by_themselves() -> None:
    for norm in (nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.InstanceNorm1d(6)):
        name = next(name for name, kind in NORMS.items() if isinstance(norm, kind.classes))
        assert NORMS[name].alone(norm) == ""
    batch, instance = NORMS["batch_norm"].alone, NORMS["instance_norm"].alone
    assert batch(nn.BatchNorm1d(6)) == "" and batch(nn.BatchNorm1d(6).eval()) is None
    tracking = nn.InstanceNorm1d(6, track_running_stats=True)
    assert instance(tracking)
    tracking.track_running_stats = False
    assert instance(tracking)  # it has them all the same


@pytest.mark.parametrize("dim", [-1, 1])
def test_gradients_of_a_norm_by_hand_go_by_the_names_of_its_module(dim: int) -> None:
    site = nn.Module()
    site.gain = nn.Parameter(torch.linspace(0.5, 2.0, 6, dtype=torch.float64)[:, None, None])
    attributes = {"dim": dim, "eps": 1e-6, "weight": "gain", "weight_axis": -1 if dim < 0 else -3}
    x = torch.randn(*((2, 3, 6) if dim < 0 else (2, 6, 3, 4)), dtype=torch.float64)
    found = magnitudes(Match("rms_norm", attributes), site, x, torch.float32)
    gradients = found.gradients(torch.ones_like(x))
    assert found.output.shape == x.shape
    assert {name: tensor.shape for name, tensor in gradients.items()} == {"input": x.shape, "gain": site.gain.shape}


def test_an_l1_norm_takes_numbers_and_names() -> None:
    for good in ({"dim": 1}, {"dim": "axis", "eps": "eps"}, {"dim": -1, "eps": 1e-6, "minimum": 2}):
        swapped_class("l1_norm", L1, good)
    wrong: tuple[dict[str, Any], ...] = (
        {"dim": 1.0},
        {"dim": 1, "eps": [1]},
        {"dim": 1, "minimum": (1,)},
        {"eps": 1.0},
    )
    for one in wrong:
        with pytest.raises(TypeError, match="must be numbers or names"):
            swapped_class("l1_norm", L1, one)


def test_an_attribute_that_holds_no_number_any_more_is_the_original_s(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = normswap.apply(L1(), normswap.plan(L1()))
    x, seen, real = torch.randn(3, 4), [], ops.l1_norm
    monkeypatch.setattr(ops, "l1_norm", lambda *given: seen.append(given[1:]) or real(*given))
    assert torch.equal(swapped(x), L1()(x)) and seen == [(1, 0.5, None)]
    swapped.eps = None
    with pytest.raises(TypeError):
        swapped(x)
