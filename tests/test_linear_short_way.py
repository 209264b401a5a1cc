"""A Linear and a BatchNorm1d in eval by native ops, which PyTorch stands for on a CPU: where all is as it mostly is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_region_changes import CHANGED
from linear_region_models import BATCH, FEATURES, FOUND, WIDTH
from models import randomised
from region_checks import Case, written
from torch import Tensor, nn

import normswap
from normswap import native, ops, reference
from normswap.activation import FUNCTIONS, Activation
from normswap.ops import at_once, dispatch
from normswap.regions.helper import Fused
from normswap.regions.install import compiled_of
from normswap.regions.projected import Projected

BEHIND = ("scaled_behind", "scaled_on_both_sides")
SERVED = [name for name in FOUND if name not in ("by_a_literal", "by_a_number", "under_autocast", *BEHIND)]
"""A number is no tensor; with a factor behind the norm none is made."""
ALONE = ("without_an_activation", "result_used_twice", "in_a_loop", "with_a_vector_added", "with_a_number_added")
ALONE = (*ALONE, "same_linear_twice")
"""Nothing stands behind the norm: of few rows another kernel normalises."""


def normalised(z: Tensor, mean: Any, var: Any, batches: Any, weight: Any, bias: Any, *rest: Any) -> Tensor | None:
    """What the native batch_norm does in eval; in training it declines."""
    training, momentum, eps, residual, code, low, high, scale, input_bias = (*rest, None, None)[:9]
    if training or mean is None or any(v is not None and v.dtype is not z.dtype for v in (mean, scale, residual)):
        return None
    settings = training, momentum, eps, input_bias, Activation([*FUNCTIONS][code], low, high), residual
    return reference.scale_batch_norm(z, scale, mean, var, weight, bias, *settings)


def folded(*given: Any) -> None:
    *tensors, eps, out, out_bias = given
    assert all(t is None or t.is_contiguous() for t in tensors)
    for into, value in zip((out, out_bias), reference.fold_scale_batch_norm(*tensors, eps), strict=True):
        into.copy_(value)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU: these native ops, and no other ones."""
    native.load()  # or it would put its own in their place when it is
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {"batch_norm": normalised})
    monkeypatch.setattr(dispatch, "_native", {"fold_linear": folded})
    monkeypatch.setattr(dispatch, "_native_tried", True)
    monkeypatch.setattr(native, "_available", False)


def made(case: Case, rows: int) -> tuple[Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = randomised(written(case.forward, case.base)).eval()
    return model, tuple(torch.randn(rows, *shape[1:]) for shape in case.shapes)


def ways_of(model: Any) -> list[Projected]:
    """What computes each region of a Linear."""
    swaps = [swap for swap in normswap.plan(model).swaps if not swap.site.name]
    compiled = [one for swap in swaps for one in compiled_of(type(model), swap.match.attributes)]
    return [way for one in compiled if (way := Fused(one).projected) is not None]


def outcome(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """What a call gives or raises, and what each of its regions gave the short way."""
    real, short = Projected._directly, list[Any]()

    def noted(self: Projected, *given: Any) -> Any:
        short.append(real(self, *given))
        return short[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Projected, "_directly", noted)
        try:
            return call(), short
        except Exception as error:
            return f"{type(error).__name__}: {error}", short


def check(case: Case, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """That the short way changes nothing; whether it was taken."""
    model, inputs = made(case, rows)
    fast = normswap.apply(model, normswap.plan(model))
    for one in (model, fast) if case.later else ():
        torch.manual_seed(1)
        case.later(one)  # type: ignore[misc]
    with torch.no_grad():
        theirs, _ = outcome(lambda: model(*(x.clone() for x in inputs)), monkeypatch)
        ours, short = outcome(lambda: fast(*(x.clone() for x in inputs)), monkeypatch)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    return [out is not None for out in short]


@pytest.mark.parametrize("rows", (2, BATCH))
@pytest.mark.parametrize("name", SERVED)
def test_it_is_taken_and_computes_what_it_did(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = check(FOUND[name], rows, monkeypatch)
    assert taken
    if name in ALONE and rows <= FEATURES:
        assert not any(taken)
    elif name != "with_a_residual_that_broadcasts":
        assert all(taken)


@pytest.mark.parametrize("rows", (2, BATCH))
@pytest.mark.parametrize("name", CHANGED)
def test_what_may_change_is_seen(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CHANGED[name]
    taken = check(case, BATCH if "sample" in name else rows, monkeypatch)
    may = ("another linear", "eps", "momentum", "tracking", "eval", "frozen", "one value", "a branch", "rows", "width")
    assert not any(taken) or any(word in name for word in may)


def _strided(model: Any) -> None:
    model.fc.bias = nn.Parameter(torch.randn(WIDTH, 2)[:, 0])
    model.bn.running_mean = torch.randn(2).repeat_interleave(WIDTH)[::2]
    model.bn.weight = nn.Parameter(torch.rand(1).expand(WIDTH))


@pytest.mark.parametrize("name", ("without_a_scale", "with_a_residual"))
def test_vectors_may_lie_anywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check(replace(FOUND[name], later=_strided), BATCH, monkeypatch))


@torch.no_grad()
def test_what_else_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(FOUND["without_a_scale"], BATCH)
    (way,) = ways_of(model)

    def short(x: Any) -> Any:
        _, found = outcome(lambda: way(model._modules, x), monkeypatch)
        return found[-1]

    assert short(inputs[0]) is not None and torch.equal(short(inputs[0]), short(inputs[0]))
    with torch.enable_grad():
        assert short(inputs[0]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert short(inputs[0]) is None
    for odd in (inputs[0].double(), inputs[0][0], inputs[0][None], None, inputs[0].to("meta")):
        assert short(odd) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert short(inputs[0]) is None
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "runs_directly", lambda *given: False)
        assert short(inputs[0]) is None
    assert short(inputs[0]) is not None
    dispatch._direct.clear()
    assert short(inputs[0]) is None


def test_what_was_folded_in_one_step_is_not_folded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(FOUND["without_a_scale"], BATCH)
    (way,) = ways_of(model)
    monkeypatch.setattr(at_once, "folded_linear", lambda *given: torch.zeros(BATCH, WIDTH))
    with torch.no_grad():
        assert not way(model._modules, inputs[0]).any()


@pytest.mark.parametrize(("cls", "name"), [(nn.Linear, "forward"), (nn.BatchNorm1d, "forward"), (F, "relu")])
def test_a_function_that_was_replaced(cls: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(FOUND["among_statements"], BATCH)
    (way,) = ways_of(model)
    packed = (inputs[0], model.scale)
    with torch.no_grad():
        assert outcome(lambda: way(model._modules, packed), monkeypatch)[1][0] is not None
        monkeypatch.setattr(cls, name, lambda *given: given[-1])
        found, short = outcome(lambda: way(model._modules, packed), monkeypatch)
        assert found is None and short in ([], [None])


def test_children_of_an_nn_sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.GELU()
    model = randomised(nn.Sequential(*layers)).eval()
    (way,) = ways_of(model)
    with torch.no_grad():
        for rows in (2, BATCH):
            x = torch.randn(rows, FEATURES)
            _, (short,) = outcome(partial(way, model._modules, x), monkeypatch)
            torch.testing.assert_close(short, model(x), rtol=1e-5, atol=1e-5)
        for child, change in (("2", nn.Dropout(0.5)), ("3", nn.Softplus()), ("1", nn.BatchNorm1d(WIDTH))):
            changed = {**model._modules, child: change}
            found, short = outcome(partial(way, changed, x), monkeypatch)
            assert short in ([], [None]) and (found is None) is (child != "1")
