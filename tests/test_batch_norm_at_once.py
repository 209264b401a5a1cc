"""BatchNorms by running statistics in one step of C++ over a stand-in for the launchers: what is computed, and what is
left to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import compiled, needs_compiler, registered
from convolution_models import drawn
from cudnn_stand_in import cudnn
from launch_stand_in import LAUNCHED
from launched_checks import Own, X, assert_left, folded, hooked, launched, outcome, put, registered_as
from norm_act_models import NormAct
from torch import Tensor, nn

import normswap
from normswap.activation import CODES
from normswap.ops import at_once

__all__ = ["compiled", "cudnn", "folded", "launched", "registered"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("launched")]


def statistics() -> tuple[Tensor, ...]:
    return torch.randn(6), torch.rand(6) + 0.5, torch.randn(6), torch.randn(6)


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("affine", (False, True))
@pytest.mark.parametrize("added", (False, True))
def test_a_batch_norm_by_running_statistics(layout: torch.memory_format, affine: bool, added: bool) -> None:
    x = X.contiguous(memory_format=layout)
    mean, var, weight, bias = statistics()
    given = (mean, var, weight, bias) if affine else (mean, var, None, None)
    behind = torch.randn_like(x) if added else None
    out = at_once._calls.batch_norm_eval(x, *given, 1e-5, behind, CODES["relu"], 0.0, 0.0)
    expected = F.batch_norm(x, *given, False, 0.0, 1e-5)
    torch.testing.assert_close(out, F.relu(expected if behind is None else expected + behind))
    assert out.stride() == x.stride() and LAUNCHED == ["batch_norm"]


ENDING_LATER: dict[str, Callable[[Any], object]] = {
    "a hook on the activation": lambda m: m.act.register_forward_hook(lambda module, given, out: out * 2),
    "a hook on what hands on": lambda m: m.drop.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
    "another activation": put("act", nn.Softplus()),
    "a dropout that is on": put("drop", nn.Dropout(1.0)),
    "hidden on the instance": lambda m: m.__dict__.update(act=torch.neg),
    "in training": lambda m: m.train(),
    "no statistics": registered_as("running_mean", "_buffers", None),
    "statistics of another class": lambda m: m._buffers.update(running_mean=m.running_mean.as_subclass(Own)),
    "of float64": lambda m: m.double(),
    "a weight that a class over it has": lambda m: setattr(
        m, "__class__", type("Over", (type(m),), {"weight": property(lambda self: 3 * self._parameters["weight"])})
    ),
}


@pytest.mark.parametrize("act", (nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.2)))
def test_a_norm_that_ends_in_an_activation(act: nn.Module) -> None:
    model = drawn(lambda: NormAct(act))
    fast = normswap.apply(model, normswap.plan(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)
    assert LAUNCHED == ["batch_norm"] * 2
    torch.testing.assert_close(fast(X), model(X), rtol=1e-5, atol=1e-5)  # with gradients
    with torch.no_grad():
        assert outcome(fast, X[0]) == outcome(model, X[0])
        torch.testing.assert_close(torch.vmap(fast)(X[None]), torch.vmap(model)(X[None]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hooked(fast, X), hooked(model, X), rtol=1e-5, atol=1e-5)
    assert LAUNCHED == ["batch_norm"] * 2


@pytest.mark.parametrize("what", ENDING_LATER)
def test_a_norm_whose_ending_is_another_by_now_is_left_to_python(what: str) -> None:
    model = drawn(NormAct)
    assert_left(model, normswap.apply(model, normswap.plan(model)), ENDING_LATER[what])


def test_what_it_is_not_given_is_left_to_python() -> None:
    given = statistics()
    eval_ = at_once._calls.batch_norm_eval
    for x in (X.double(), X.as_subclass(Own), X.to("meta"), X.to_sparse(), torch._neg_view(X), None):
        assert eval_(x, *given, 1e-5, None, 0, 0.0, 0.0) is None
    assert eval_(X, given[0].to("meta"), *given[1:], 1e-5, None, 0, 0.0, 0.0) is None
    assert LAUNCHED == []
    with pytest.raises(TypeError, match="10 arguments"):
        eval_(X)
