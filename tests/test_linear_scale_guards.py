"""What the forward of Linear -> scale -> BatchNorm asks on a call before it computes, spoiled one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import randomised
from torch import Tensor, nn

from normswap import ops
from normswap.forwards import linear_scale_batch_norm as forwards
from normswap.forwards.linear_scale_batch_norm import is_factor, linear_scale_batch_norm, tensors_fit

IN, OUT = 4, 3


class Own(Tensor):
    """What a library may have in a tensor's place."""


def parts(training: bool = True, **options: Any) -> tuple[Any, Any]:
    linear, bn = nn.Linear(IN, OUT), nn.BatchNorm1d(OUT, **options)
    return randomised(linear), randomised(bn).train(training)


def hooked(child: nn.Module) -> nn.Module:
    child.register_forward_hook(lambda *_: None)
    return child


X, SCALE = torch.randn(8, IN), torch.randn(OUT)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("after", [None, 2.0, SCALE])
@pytest.mark.parametrize("scale", [None, 0.5, SCALE, SCALE[None], SCALE[:1]])
def test_it_is_the_formula(scale: Any, after: Any, training: bool, rows: int) -> None:
    for options in ({}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}):
        linear, bn = parts(training, **options)
        theirs_linear, theirs = parts(training, **options)
        theirs_linear.load_state_dict(linear.state_dict()), theirs.load_state_dict(bn.state_dict())
        with torch.no_grad():
            for _ in range(2):
                found = linear_scale_batch_norm(X[:rows], linear, scale, bn, after)
                expected = theirs(theirs_linear(X[:rows]) * (1.0 if scale is None else scale))
                torch.testing.assert_close(found, expected * (1.0 if after is None else after))
        for (name, mine), other in zip(bn.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, other, msg=name)


def without(bn: Any, name: str) -> Any:
    setattr(bn, name, None)
    return bn


SPOILED: dict[str, Callable[[Any, Any], tuple[Any, Any, Any, Any]]] = {
    "x of another class": lambda linear, bn: (X.as_subclass(Own), linear, SCALE, bn),
    "x is a number": lambda linear, bn: (1.0, linear, SCALE, bn),
    "x of three dims": lambda linear, bn: (X[None], linear, SCALE, bn),
    "x of integers": lambda linear, bn: (X.int(), linear, SCALE, bn),
    "x elsewhere": lambda linear, bn: (X.to("meta"), linear.to("meta"), SCALE.to("meta"), bn.to("meta")),
    "x of another dtype": lambda linear, bn: (X.double(), linear, SCALE.double(), bn),
    "linear hooked": lambda linear, bn: (X, hooked(linear), SCALE, bn),
    "bn hooked": lambda linear, bn: (X, linear, SCALE, hooked(bn)),
    "linear of another class": lambda linear, bn: (X, nn.Sequential(linear), SCALE, bn),
    "bn of another class": lambda linear, bn: (X, linear, SCALE, nn.LayerNorm(OUT)),
    "another width": lambda linear, bn: (X, linear, SCALE, nn.BatchNorm1d(OUT + 1)),
    "no mean": lambda linear, bn: (X, linear, SCALE, without(bn, "running_mean")),
    "no variance": lambda linear, bn: (X, linear, SCALE, without(bn, "running_var")),
    "scale of another dtype": lambda linear, bn: (X, linear, SCALE.double(), bn),
    "scale of another shape": lambda linear, bn: (X, linear, torch.randn(8, OUT), bn),
    "scale of another class": lambda linear, bn: (X, linear, SCALE.as_subclass(Own), bn),
    "scale is a word": lambda linear, bn: (X, linear, "scale", bn),
    "scale is a truth": lambda linear, bn: (X, linear, True, bn),
    "bias of another class": lambda linear, bn: (X, with_data(linear, "bias"), SCALE, bn),
    "bn bias of another class": lambda linear, bn: (X, linear, SCALE, with_data(bn, "bias")),
    "bn in another dtype": lambda linear, bn: (X, linear, SCALE, bn.double()),
    "bn in two dtypes": lambda linear, bn: (X, linear, SCALE, with_half(bn)),
}


def with_data(module: Any, name: str) -> Any:
    tensor = getattr(module, name).detach().as_subclass(Own)
    del module._parameters[name]
    vars(module)[name] = tensor
    return module


def with_half(bn: Any) -> Any:
    bn.running_var = bn.running_var.half()
    return bn


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("what", SPOILED)
def test_it_is_left_alone(what: str, training: bool) -> None:
    linear, bn = parts(training)
    with torch.no_grad():
        assert linear_scale_batch_norm(X, linear, SCALE, bn) is not None
        x, linear, scale, bn = SPOILED[what](linear, bn)
        assert linear_scale_batch_norm(x, linear, scale, bn) is None
        linear, bn = parts(training)
        if what.startswith("scale"):
            assert linear_scale_batch_norm(X, linear, SCALE, bn, scale) is None


def test_it_is_left_alone_where_it_would_be_recorded_or_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, bn = parts()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_scale_batch_norm(X, linear, SCALE, bn) is None
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert linear_scale_batch_norm(X, linear, SCALE, bn) is None


def test_one_row_has_no_statistics() -> None:
    linear, bn = parts()
    assert linear_scale_batch_norm(X[:1], linear, SCALE, bn) is None
    with torch.no_grad():
        assert linear_scale_batch_norm(X[:1], linear, SCALE, bn.eval()) is not None


@pytest.mark.parametrize("rows", [IN, IN + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_who_learns_in_eval(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than features are folded, which has gradients but in float16; others are not computed at all."""
    folds: list[int] = []
    real = ops.folded_linear
    monkeypatch.setattr(ops, "folded_linear", lambda *given: folds.append(1) or real(*given))
    x, scale = X[:rows].to(dtype), SCALE.to(dtype)
    linear, bn = (part.to(dtype) for part in parts(False))
    for part in (linear, bn):
        part.requires_grad_(False)
    many = rows > IN and dtype is not torch.float64
    given: dict[str, Callable[[], Any]] = {
        "x": lambda: linear_scale_batch_norm(x.clone().requires_grad_(), linear, scale, bn),
        "scale": lambda: linear_scale_batch_norm(x, linear, scale.clone().requires_grad_(), bn),
    }
    for part, name in ((linear, "weight"), (linear, "bias"), (bn, "weight"), (bn, "bias")):

        def learning(part: Any = part, name: str = name) -> Any:
            getattr(part, name).requires_grad_(True)
            try:
                return linear_scale_batch_norm(x, linear, scale, bn)
            finally:
                getattr(part, name).requires_grad_(False)

        given[f"{type(part).__name__}.{name}"] = learning
    for name, run in given.items():
        assert (run() is None) == (not many or dtype is torch.float16), name
        with torch.no_grad():
            assert run() is not None, name
    folds.clear()
    assert linear_scale_batch_norm(x, linear, scale, bn) is not None and bool(folds) == many
    found = torch.func.vmap(lambda row: row * 0 + bool(forwards._is_transformed()))(torch.zeros(2))
    assert found.all() and not forwards._is_transformed()


def test_numbers_that_sixteen_bits_hold() -> None:
    short = (0.5, 1.0, 1.5, 255.0, 0.0, 2.0**-13, -3.0)
    for number in short:
        assert forwards._is_short(number), number
    for number in (0.1, 257.0, 2.0**-16, 2.0**12, 1 / 3):
        assert not forwards._is_short(number), number
    half = X.half()
    for number, usable in ((0.5, True), (0.1, False)):
        assert forwards._factor(number, half, OUT)[0] == usable and forwards._factor(number, X, OUT)[0]
        assert forwards._factor(number, X.double(), OUT)[0]
    assert forwards._factor(None, X, OUT) == (True, None)


def test_factors() -> None:
    for good in (torch.ones(()), torch.ones(1), torch.ones(OUT), torch.ones(1, OUT), nn.Parameter(SCALE)):
        assert is_factor(good, X, OUT)
    for bad in (1.0, torch.ones(IN), torch.ones(OUT, 1), SCALE.double(), SCALE.to("meta"), SCALE.as_subclass(Own)):
        assert not is_factor(bad, X, OUT)


def fit(x: Tensor, linear: Any, bn: Any) -> bool:
    return tensors_fit(x, (linear.weight, linear.bias), (bn.weight, bn.bias, bn.running_mean, bn.running_var))


def test_tensors_that_pytorch_takes_together() -> None:
    linear, bn = parts()
    assert fit(X, linear, bn) and fit(X, nn.Linear(IN, OUT, bias=False), nn.BatchNorm1d(OUT, affine=False))
    assert fit(X.half(), linear.half(), bn) and fit(X.half(), linear, bn.half())
    assert not fit(X, linear, bn.float()) and not fit(X.half(), linear, bn.double())
    assert fit(X.double(), linear.double(), bn) and not fit(X.double(), linear, bn.float())
    linear, bn = parts()
    assert not fit(X, linear.to("meta"), bn)
    linear, bn = parts()
    assert not fit(X, linear, bn.to("meta"))


@pytest.mark.parametrize("spoil", ["float16", "no bias", "a wide bias", "declined", "compiling"])
def test_who_adds_the_bias_of_the_linear(spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "native_serves", lambda *tensors: spoil != "declined")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: spoil == "compiling")
    linear = nn.Linear(IN, OUT, bias=spoil != "no bias")
    if spoil == "a wide bias":
        linear.bias = nn.Parameter(torch.ones(1, OUT))
    x = X.half() if spoil == "float16" else X
    assert not forwards._norm_adds_bias(x, linear.weight, linear.bias, SCALE)
    monkeypatch.setattr(ops, "native_serves", lambda *tensors: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    linear = nn.Linear(IN, OUT)
    assert forwards._norm_adds_bias(X, linear.weight, linear.bias, SCALE)


def test_what_multiplies_is_known_by_its_code() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Called(Scale):
        def __call__(self, x: Tensor) -> Tensor:
            return x

    code = forwards.fingerprint(Scale.forward)
    assert code and forwards.multiplies(Scale(), code) and not forwards.multiplies(Scale(), "another")
    assert not forwards.multiplies(Called(), code) and not forwards.multiplies(hooked(Scale()), code)
    assert forwards.fingerprint(torch.relu) == "" and forwards.fingerprint(Scale()) == ""
    Scale.forward.__code__ = (lambda self, x: x * 3).__code__
    assert forwards.fingerprint(Scale.forward) != code and not forwards.multiplies(Scale(), code)
