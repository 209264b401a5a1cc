"""Norms whose weights or statistics are no Parameters and buffers, before they are swapped or since."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import randomised
from torch import Tensor, nn

import normswap

NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(8), (4, 8)),
    "rms_norm": (lambda: nn.RMSNorm(8), (4, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (4, 8, 3, 3)),
    "batch_norm": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
}
by_norm = pytest.mark.parametrize("kind", NORMS)


def hidden_by(norm: Any, also_registered: bool) -> None:
    """Tensors of other values that stand in the module's ``__dict__``, where reading an attribute looks first."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        known = getattr(norm, name, None)
        if isinstance(known, Tensor):
            if not also_registered:
                norm._parameters.pop(name, None)
                norm._buffers.pop(name, None)
            norm.__dict__[name] = known.detach() + 1.0


@by_norm
@pytest.mark.parametrize("also_registered", (False, True))
@pytest.mark.parametrize("training", (False, True))
def test_a_norm_of_plain_attributes_is_refused(kind: str, also_registered: bool, training: bool) -> None:
    make, shape = NORMS[kind]
    model = nn.Sequential(randomised(make())).train(training)
    hidden_by(model[0], also_registered)
    x = torch.randn(shape)
    with pytest.warns(UserWarning):
        found = normswap.optimize(model, x, min_speedup=None, validate="grad", on_empty="warn")
    rows = normswap.report(found).rows
    assert len(rows) == (0 if kind == "batch_norm" and not training else 1)  # that is a site of regions alone
    assert all(row["status"] == "refused" and "plain attribute" in row["reason"] for row in rows)
    assert torch.equal(found(x), model(x))


@by_norm
@pytest.mark.parametrize("also_registered", (False, True))
@pytest.mark.parametrize("training", (False, True))
def test_a_swapped_norm_reads_what_python_reads(kind: str, also_registered: bool, training: bool) -> None:
    make, shape = NORMS[kind]
    model = nn.Sequential(randomised(make())).train(training)
    swapped = normswap.apply(copy.deepcopy(model), normswap.plan(model))
    for one in (model, swapped):
        hidden_by(one[0], also_registered)
    x = torch.randn(shape)
    assert torch.equal(swapped(x), model(x))
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(swapped[0], name, x), getattr(model[0], name, x))


def convolved() -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def multiplied() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU())


HIDDEN = {0: ("weight", "bias"), 1: ("weight", "running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize(("child", "name"), [(child, name) for child, names in HIDDEN.items() for name in names])
@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize(("make", "shape"), ((convolved, (2, 3, 8, 8)), (multiplied, (16, 3))))
def test_a_region_of_a_plain_attribute_is_proved(
    make: Any, shape: tuple[int, ...], training: bool, child: int, name: str
) -> None:
    model, x = randomised(make()).train(training), torch.randn(shape)
    value = getattr(model[child], name).detach().clone()
    delattr(model[child], name)
    setattr(model[child], name, value)
    found = normswap.optimize(model, x, min_speedup=None)
    rows = normswap.report(found).rows
    assert rows and {row["status"] for row in rows} <= {"wiring", "refused"}
    assert any(row["status"] == "wiring" and not row["reason"] for row in rows)
    torch.testing.assert_close(found(x), model(x))
