"""BatchNorms that are called as functions in training, with what stands behind them: what is computed, what is updated,
and that the proof looks at both."""

from __future__ import annotations

import copy
from typing import Any

import batch_norm_stand_in
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import seeded
from norm_act_models import Alone, ByTheBatch, NormAct
from torch import Tensor, nn

import normswap
from normswap import ops

IMAGE = (3, 6, 5, 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return batch_norm_stand_in.install(monkeypatch)


class Block(nn.Module):
    """The function, a residual and an activation among other statements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(2 * x, n.running_mean, n.running_var, n.weight, n.bias, self.training, 0.2, n.eps)
        return F.relu(y + x) * 0.5


def steps(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    """What some steps give: outputs, gradients and buffers."""
    found = []
    for given in inputs:
        x = given.clone().requires_grad_()
        out = model(x)
        out.square().sum().backward()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    return found


@pytest.mark.parametrize("momentum", (0.1, None, 0.0), ids=str)
@pytest.mark.parametrize("act", (nn.ReLU(inplace=True), nn.SiLU(), nn.Identity()), ids=lambda act: type(act).__name__)
@pytest.mark.parametrize("drop", (0.0, None), ids=str)
def test_it_trains_as_the_original(act: nn.Module, momentum: Any, drop: float | None, calls: list[str]) -> None:
    model = seeded(NormAct(copy.deepcopy(act), None if drop is None else nn.Dropout(drop))).train()
    model.momentum = momentum
    inputs = [torch.randn(IMAGE) for _ in range(3)]
    fast = normswap.optimize(model, inputs[0])
    assert [row["status"] for row in normswap.report(fast).rows] == ["wiring"]
    calls.clear()
    torch.testing.assert_close(steps(fast, inputs), steps(model, inputs), rtol=1e-4, atol=1e-4)
    assert calls.count("batch_norm_recorded") == 3


@pytest.mark.parametrize("norm", (Block, NormAct, ByTheBatch))
@pytest.mark.parametrize("tracks", (True, False))
def test_however_it_is_written(norm: Any, tracks: bool) -> None:
    model = seeded(norm()).train()
    inner = model.norm if norm is Block else model
    if not tracks:
        inner.running_mean = inner.running_var = None
    inputs = [torch.randn(IMAGE) for _ in range(2)]
    before = copy.deepcopy(model.state_dict())
    fast = normswap.optimize(model, inputs[0])
    for one in (model, fast):
        assert all(torch.equal(value, before[key]) for key, value in one.state_dict().items())
    assert "" in normswap.report(fast).swapped
    torch.testing.assert_close(steps(fast, inputs), steps(model, inputs), rtol=1e-4, atol=1e-4)
    for one in (model, fast):
        one.eval()
    if norm is not Block or tracks:  # which raises without statistics
        assert torch.equal(fast(inputs[0]), model(inputs[0]))


def test_one_that_is_frozen_is_left_alone() -> None:
    model = seeded(Alone()).train()
    assert not normswap.plan(model).swaps


class Kept(nn.Module):
    """Statistics of its own, in a module and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean, self.var = nn.BatchNorm2d(6), nn.Buffer(torch.zeros(6)), nn.Buffer(torch.ones(6))


class ReadBetween(Kept):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(x, self.mean, self.var, n.weight, n.bias, True, 0.2, 1e-5)
        m = self.mean * 2
        return F.relu(y) * m[None, :, None, None]


class ReadBetweenByAnotherName(Kept):
    def forward(self, x: Tensor) -> Tensor:
        n, mean = self.norm, self.mean
        y = F.batch_norm(x, mean, self.var, n.weight, n.bias, self.training, 0.2, 1e-5)
        m = mean + 1
        return F.relu(y) * m[None, :, None, None]


class OfAChildThatIsCalledBetween(Kept):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, momentum=0.2, training=True)
        z = self.norm(2 * x)
        return F.relu(y) + z


class WrittenBetween(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.mean, self.var, self.norm.weight, self.norm.bias, True, 0.2, 1e-5)
        self.mean.mul_(0.5)
        return F.relu(y)


class ReadAround(Kept):
    """Which is right."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean.clone()
        y = F.relu(F.batch_norm(x, self.mean, self.var, self.norm.weight, self.norm.bias, True, 0.2, 1e-5))
        return y * (self.mean - old)[None, :, None, None]


class Repeated(Kept):
    """Which is right."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.relu(F.batch_norm(x, self.mean, self.var, self.norm.weight, self.norm.bias, True, 0.2, 1e-5))
        return x


MOVED = (ReadBetween, ReadBetweenByAnotherName, OfAChildThatIsCalledBetween, WrittenBetween)


@pytest.mark.parametrize("cls", (*MOVED, ReadAround, Repeated))
def test_what_it_updates_is_written_when_it_was(cls: Any) -> None:
    model = seeded(cls()).train()
    fast, inputs = normswap.apply(model, normswap.plan(model)), [torch.randn(IMAGE) for _ in range(3)]
    assert ("" in normswap.report(fast).swapped) == (cls not in MOVED)
    for x in inputs:
        torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast.state_dict(), model.state_dict())


FAULTS: dict[str, Any] = {
    "an output": lambda op: lambda x, *a, **k: op(x, *a, **k) * 1.001,
    "a mean that is kept": lambda op: lambda x, mean, *a, **k: op(x, mean.add_(1e-3), *a, **k),
    "a variance that is kept": lambda op: lambda x, mean, var, *a, **k: op(x, mean, var.mul_(1.001), *a, **k),
    "a momentum": lambda op: lambda x, m, v, w, b, t, momentum, *a, **k: op(x, m, v, w, b, t, momentum * 1.01, *a, **k),
    "a gradient": lambda op: lambda x, *a, **k: op(x + 0.01 * (x - x.detach()), *a, **k),
    "no gradient of the weight": lambda op: lambda x, m, v, w, *a, **k: op(x, m, v, w.detach(), *a, **k),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_put_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "batch_norm", FAULTS[fault](ops.batch_norm))
    model = seeded(NormAct()).train()
    with pytest.warns(UserWarning, match="did not match"):
        fast = normswap.optimize(model, torch.randn(IMAGE))
    assert not normswap.report(fast).swapped and type(fast) is NormAct


def test_the_magnitude_of_the_inputs_is_that_of_the_batch() -> None:
    """Large means: the limit of the running statistics and of the gradients follows."""
    model = seeded(NormAct(nn.GELU())).train()
    fast = normswap.optimize(model, torch.randn(IMAGE) + 1000)
    assert len(normswap.report(fast).swapped) == 1
