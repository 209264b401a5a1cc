"""BatchNorm by running statistics as an op and as the norm of a region, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import seeded
from norm_act_models import NormAct
from torch import Tensor, nn

import normswap
from normswap import ops
from normswap.activation import CODES, Activation


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("residual", (False, True))
def test_it_is_pytorchs_composition(name: str, residual: bool) -> None:
    activation = Activation(name, *{"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}.get(name, (0.0, 0.0)))
    x, added = torch.randn(3, 6, 5), torch.randn(3, 6, 5)
    values = [torch.randn(6), torch.rand(6) + 0.5, torch.randn(6), torch.randn(6)]
    normalised = F.batch_norm(x, *values, eps=1e-3)
    expected = activation(normalised + added if residual else normalised)
    given = {"residual": added} if residual else {}
    assert torch.equal(ops.batch_norm_eval(x, *values, 1e-3, activation, **given), expected)


class Block(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(4, **settings), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(x) + x)


def kinds(model: nn.Module) -> list[str]:
    return [swap.match.kind for swap in normswap.plan(model).swaps]


def test_alone_only_a_training_norm_is_taken() -> None:
    assert kinds(Block().eval()) == kinds(Block(track_running_stats=False).eval()) == ["region"]
    assert kinds(Block()) == ["region", "batch_norm"]
    hooked = Block().eval()
    hooked.bn.register_forward_hook(lambda *_: None)
    assert kinds(hooked) == []


def test_modes_and_statistics_are_read_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().eval()
    for values in (model.bn.weight, model.bn.bias, model.bn.running_mean):
        nn.init.normal_(values)
    x = torch.randn(3, 4, 5, 6)
    fast = normswap.optimize(model, x)
    calls: list[int] = []
    real = ops.batch_norm_eval
    monkeypatch.setattr(ops, "batch_norm_eval", lambda *a, **k: calls.append(1) or real(*a, **k))
    assert torch.equal(fast(x), model(x)) and len(calls) == 1
    for one in (model, fast):
        one.bn.running_mean.fill_(0.5)
        one.bn.eps = 0.25
    assert torch.equal(fast(x), model(x)) and len(calls) == 2
    for one in (model, fast):
        one.train()
    assert torch.equal(fast(x), model(x)) and len(calls) == 2
    assert torch.equal(fast.bn.running_mean, model.bn.running_mean)
    assert fast.bn.num_batches_tracked == model.bn.num_batches_tracked == 1
    for one in (model, fast):
        one.eval()
        one.bn.running_mean = one.bn.running_var = None
    assert torch.equal(fast(x), model(x)) and len(calls) == 2


def norms_with_activations() -> Any:
    return seeded(nn.Sequential(*(NormAct(act, channels=4) for act in (None, nn.SiLU(), nn.Identity())))).eval()


def test_a_norm_that_ends_in_an_activation_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = norms_with_activations(), torch.randn(3, 4, 5, 6)
    fast = normswap.optimize(model, x)
    assert [swap.site.name for swap in normswap.report(fast).plan.swaps] == ["0", "1"]
    assert [row["status"] for row in normswap.report(fast).rows] == ["wiring"] * 2
    acts: list[str] = []
    real = ops.batch_norm_eval
    monkeypatch.setattr(ops, "batch_norm_eval", lambda *a, **k: acts.append(a[6].name) or real(*a, **k))
    with torch.no_grad():
        assert torch.equal(fast(x), model(x)) and acts == ["relu", "silu"]
        for one in (model, fast):
            one[0].running_mean.data.fill_(0.5)
            one[0].act.register_forward_hook(lambda *args: args[2] + 1)
            one[1].eps = 0.25
        assert torch.equal(fast(x), model(x)) and acts == ["relu", "silu", "silu"]


def test_what_was_planned_in_eval_runs_its_own_statements_with_gradients_and_in_training() -> None:
    model, x = norms_with_activations(), torch.randn(3, 4, 5, 6)
    fast = normswap.apply(model, normswap.plan(model))
    for mode in (False, True):
        for one in (model, fast):
            one.train(mode)
            one.zero_grad()
            one(x).square().sum().backward()
        for ours, theirs in zip(fast.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert all(torch.equal(a, b) for a, b in zip(fast.buffers(), model.buffers(), strict=True))
    before = {key: value.clone() for key, value in fast.state_dict().items()}
    normswap.validate(fast, x)
    assert all(torch.equal(value, before[key]) for key, value in fast.state_dict().items())


def test_a_wrong_statistic_fails_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = norms_with_activations(), torch.randn(3, 4, 5, 6)
    real = ops.batch_norm_eval
    monkeypatch.setattr(ops, "batch_norm_eval", lambda x, mean, *a, **k: real(x, mean * 1.001, *a, **k))
    with pytest.warns(UserWarning, match="do not match"):
        fast = normswap.optimize(model, x, on_empty="ignore")
    assert not normswap.report(fast).plan.swaps
