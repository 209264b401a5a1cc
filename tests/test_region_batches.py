"""The short way through C++ of a BatchNorm in training, by itself and as a region, over a stand-in for the native op on
the CPU: what it computes and updates, and all that makes it leave the call to the long way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import CALLED, calls, compiled, needs_compiler, registered, short_way
from batch_norm_models import CLASSES, seeded
from norm_models import BATCH_NORMS
from torch import Tensor, nn

import normswap

__all__ = ["calls", "compiled", "registered", "short_way"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("short_way")]

SHAPES = {2: (9, 6), 3: (4, 6, 5), 4: (3, 6, 5, 4), 5: (2, 6, 3, 4, 2)}
Calls = list[tuple[Any, ...]]


class Alone(nn.Module):
    def __init__(self, dims: int = 4, **settings: Any) -> None:
        super().__init__()
        self.bn, self.act = CLASSES[dims](6, **settings), nn.LeakyReLU(0.1)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.bn(x)


class Activated(Alone):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.relu(self.bn(x))


class Added(Alone):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        x = self.bn(x)
        x += r
        return self.act(x)


FORMS: tuple[type[Alone], ...] = (Alone, Activated, Added)


def swapped(model: nn.Module) -> Any:
    return normswap.apply(copy.deepcopy(model), normswap.plan(model))


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("settings", BATCH_NORMS)
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_one_op_computes_and_updates_it(form: type[Alone], dims: int, settings: str, gradients: bool) -> None:
    model = seeded(form(dims, **BATCH_NORMS[settings])).train()
    ours = swapped(model)
    averages = BATCH_NORMS[settings].get("momentum", 0.1) is None  # over all batches: Python counts these
    for step in range(2):
        x, r = torch.randn(SHAPES[dims]), torch.randn(SHAPES[dims])
        with torch.set_grad_enabled(gradients):
            found = ours(x, r)
            assert found.requires_grad == (gradients and model.bn.affine)
            torch.testing.assert_close(found, model(x, r))
        assert len(CALLED) == (0 if averages else step + 1) and {*CALLED} <= {"batch_norm"}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


def _hooked(model: Any) -> None:
    model.bn.register_forward_hook(lambda *given: None)


def _elsewhere(model: Any) -> None:
    del model.bn._buffers["running_mean"]
    model.bn.running_mean = torch.zeros(6)


def _hidden(model: Any) -> None:
    model.bn.__dict__["running_var"] = torch.ones(6)


def _emptied(model: Any) -> None:
    del model.bn._buffers["num_batches_tracked"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "eval": lambda model: model.eval(),
    "training of no bool": lambda model: setattr(model.bn, "training", 1),
    "no eps": lambda model: setattr(model.bn, "eps", 0.0),
    "an eps below 0": lambda model: setattr(model.bn, "eps", -1e-3),
    "the average of all batches": lambda model: setattr(model.bn, "momentum", None),
    "a whole momentum": lambda model: setattr(model.bn, "momentum", 1),
    "tracking of no bool": lambda model: setattr(model.bn, "track_running_stats", 1),
    "statistics elsewhere": _elsewhere,
    "hidden statistics": _hidden,
    "no count": _emptied,
    "statistics on another device": lambda model: setattr(model.bn, "running_mean", torch.zeros(6, device="meta")),
    "weights of another size": lambda model: setattr(model.bn, "weight", nn.Parameter(torch.ones(5))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_left_to_the_long_way(form: type[Alone], name: str, calls: Calls) -> None:
    model = seeded(form()).train()
    ours = swapped(model)
    x, r = torch.randn(SHAPES[4]), torch.randn(SHAPES[4])
    ours(x, r)
    ((one, owner, packed),) = calls
    assert one(owner, packed) is not None
    CHANGES[name](ours)
    assert one(owner, packed) is None


def test_a_hook_in_a_region_fires(calls: Calls) -> None:
    ours = swapped(seeded(Activated()).train())
    ours(torch.randn(SHAPES[4]), torch.randn(SHAPES[4]))
    ((one, owner, packed),) = calls
    _hooked(ours)
    assert one(owner, packed) is None


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("form", FORMS[:2])
def test_an_input_of_another_rank_is_left_to_the_long_way(form: type[Alone], dims: int, calls: Calls) -> None:
    ours = swapped(seeded(form(dims)).train())
    x = torch.randn(SHAPES[dims])
    ours(x, x)
    ((one, owner, _),) = calls
    ranks = {rank for rank, shape in SHAPES.items() if one(owner, torch.randn(shape)) is not None}
    assert ranks == ({2, 3} if dims < 4 else {dims})


def test_switched_off_statistics_are_not_touched() -> None:
    model = seeded(Activated()).train()
    ours = swapped(model)
    for one in (model, ours):
        one.bn.track_running_stats = False
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    x = torch.randn(SHAPES[4])
    torch.testing.assert_close(ours(x, x), model(x, x))
    assert CALLED == ["batch_norm"] and all(torch.equal(before[name], buffer) for name, buffer in ours.named_buffers())


def test_under_autocast_it_stays_in_the_dtype_of_its_input() -> None:
    model = seeded(Added()).train()
    ours = swapped(model)
    torch.set_autocast_enabled("cuda", True)
    x, r = torch.randn(SHAPES[4]), torch.randn(SHAPES[4])
    assert ours(x, r).dtype is torch.float32 and CALLED == ["batch_norm"]
