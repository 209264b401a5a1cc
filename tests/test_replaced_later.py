"""What somebody replaces after the swap: a function of torch.nn.functional, as a profiler does that counts operations,
or the way that one module is called, as a quantizer does. What called it goes on calling it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import compiled, needs_compiler, registered
from long_way import go_the_long_way
from models import randomised
from torch import Tensor, nn

import normswap

__all__ = ["compiled", "registered"]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn2 = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
        self.fc, self.bn1 = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.gn, self.ln, self.rms = nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.inorm = nn.InstanceNorm1d(4)
        self.drop, self.silu, self.gelu, self.leaky = nn.Dropout(0.5), nn.SiLU(), nn.GELU(), nn.LeakyReLU()
        self.relu6, self.hardswish, self.relu = nn.ReLU6(), nn.Hardswish(), nn.ReLU()

    def forward(self, x: Tensor) -> list[Tensor]:
        image = self.relu(self.bn2(self.conv(x)))
        rows = F.relu(self.bn1(self.fc(x.mean((2, 3)))))
        norms = [norm(rows) for norm in (self.ln, self.rms)]
        return [
            *(image, rows, *norms, self.inorm(rows.view(-1, 4, 8))),
            *(self.silu(self.drop(self.gn(rows))), self.gelu(self.ln(rows)), self.leaky(self.rms(rows))),
            *(self.relu6(self.gn(rows)), self.hardswish(self.gn(rows))),
        ]


FUNCTIONS = (
    *("conv2d", "linear", "batch_norm", "group_norm", "layer_norm", "rms_norm", "instance_norm", "dropout", "relu"),
    *("silu", "gelu", "leaky_relu", "hardtanh", "hardswish"),
)


@pytest.fixture(params=("C++", "Python"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "Python":
        go_the_long_way(monkeypatch)
    return request.param


@needs_compiler
@pytest.mark.usefixtures("registered", "way")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_was_replaced_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = randomised(Parts()).eval(), torch.randn(8, 6, 5, 5)
    ours, original, calls = normswap.optimize(model, x, min_speedup=None), getattr(F, name), list[str]()

    def replaced(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return original(*given, **named) * 2

    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        with monkeypatch.context() as patch:
            patch.setattr(F, name, replaced)
            expected, count = model(x), len(calls)
            torch.testing.assert_close(ours(x), expected)
        assert len(calls) == 2 * count > 0
        torch.testing.assert_close(ours(x), model(x))


CHILDREN = tuple(Parts()._modules)


@needs_compiler
@pytest.mark.usefixtures("registered", "way")
@pytest.mark.parametrize("name", CHILDREN)
def test_a_module_is_called_by_what_it_has_of_its_own(name: str) -> None:
    model, x = randomised(Parts()).eval(), torch.randn(8, 6, 5, 5)
    ours, calls = normswap.optimize(model, x, min_speedup=None), list[nn.Module]()
    call: Any = nn.Module._call_impl

    def doubled(self: nn.Module, *given: Any) -> Any:
        calls.append(self)
        return call(self, *given) * 2

    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
        for one in (ours, model):
            one._modules[name].__dict__["_call_impl"] = types.MethodType(doubled, one._modules[name])
        torch.testing.assert_close(ours(x), model(x))
        assert 2 * sum(one is ours._modules[name] for one in calls) == len(calls) > 0
        swapped_again = normswap.optimize(model, x, min_speedup=None)
        torch.testing.assert_close(swapped_again(x), model(x))
        for one in (ours, model):
            del one._modules[name].__dict__["_call_impl"]
        torch.testing.assert_close(ours(x), model(x))


def test_a_weight_that_such_a_way_reads_is_not_folded() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    assert normswap.fold(randomised(model).eval())[1].__class__ is nn.Identity
    model[2].__dict__["_call_impl"] = lambda x: torch.relu(x) + model[0].weight.sum()
    with pytest.raises(normswap.NormswapError, match="no module of this model is"):
        normswap.fold(model, inplace=True)
