"""The short way through C++ of a Linear with scale and BatchNorm: what it computes over stand-ins on the CPU, with
gradients too, and what makes it decline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from at_once_stand_in import calls, compiled, needs_compiler, registered, short_way
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import modules, ops, reference
from normswap.ops import at_once

__all__ = ["calls", "compiled", "registered", "short_way"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("short_way")]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.scale: Any = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x) * self.scale)


@pytest.fixture
def folding(compiled: torch.library.Library) -> Iterator[list[str]]:
    """The native fold, of CPU tensors, and its calls."""
    folded: list[str] = []

    def fold(w: Any, b: Any, scale: Any, mean: Any, var: Any, g: Any, beta: Any, eps: float, out: Any, c: Any) -> None:
        folded.append("fold")
        weight, bias = reference.fold_scale_batch_norm(w, b, scale, mean, var, g, beta, eps)
        out.copy_(weight)
        c.copy_(bias)

    library = torch.library.Library("normswap", "IMPL")
    library.impl("fold_linear", fold, "CPU")
    yield folded
    library._destroy()


def at_once_of(model: Scaled, x: Tensor) -> Any:
    return at_once.folded_linear(x, model.linear, model.scale, model.bn, nn.Linear, nn.BatchNorm1d)


@pytest.mark.parametrize("shape", ((3,), (1, 3), (1,), (), None))
def test_one_step_folds_and_multiplies(shape: Any, folding: list[str]) -> None:
    model, x = randomised(Scaled()).eval(), torch.randn(9, 4)
    if shape is not None:
        model.scale = nn.Parameter(torch.randn(shape))
    with torch.no_grad():
        expected = model(x)
        if shape is None:
            model.scale = None
            expected = model.bn(model.linear(x))
        torch.testing.assert_close(at_once_of(model, x), expected)
    assert folding == ["fold"]


def test_a_swapped_module_goes_this_way(folding: list[str]) -> None:
    model, x = randomised(Scaled()).eval(), torch.randn(9, 4)
    ours = normswap.apply(model, normswap.plan(model))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert folding == ["fold"]


def test_our_own_module_goes_this_way_where_nobody_compiles_it(
    folding: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = randomised(modules.LinearScaleBatchNorm(4, 3)).eval(), torch.randn(9, 4)
    with torch.no_grad():
        expected = model.bn(model.gemm(x) * model.scale)
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
            assert folding == ["fold"]
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


class _Linear(nn.Linear):
    pass


def _elsewhere(model: Any) -> None:
    model.linear.bias_orig = model.linear._parameters.pop("bias")
    model.linear.bias = model.linear.bias_orig * 2


UNFOLDED: dict[str, Callable[[Any], Any]] = {
    "training": lambda model: model.bn.train(),
    "a hook": lambda model: model.linear.register_forward_hook(lambda *given: None),
    "a hook on the norm": lambda model: model.bn.register_forward_pre_hook(lambda *given: None),
    "a subclass": lambda model: setattr(model, "linear", _Linear(4, 3)),
    "a number": lambda model: setattr(model, "scale", None) or model.__dict__.update(scale=2.0),
    "a scale of another dtype": lambda model: setattr(model, "scale", nn.Parameter(torch.randn(3).double())),
    "a scale of rows": lambda model: setattr(model, "scale", nn.Parameter(torch.randn(9, 1))),
    "a bias elsewhere": _elsewhere,
    "a strided bias": lambda model: setattr(model.linear, "bias", nn.Parameter(torch.randn(3, 2)[:, 0])),
    "strided statistics": lambda model: setattr(model.bn, "running_var", torch.ones(1).expand(3)),
    "no statistics": lambda model: setattr(model, "bn", nn.BatchNorm1d(3, track_running_stats=False).eval()),
    "another size": lambda model: setattr(model, "bn", nn.BatchNorm1d(2).eval()),
    "wide statistics": lambda model: model.bn.double(),
    "an eps below zero": lambda model: setattr(model.bn, "eps", -1e-12),
    "a transposed weight": lambda model: setattr(
        model.linear, "weight", nn.Parameter(torch.randn(4, 3).t(), requires_grad=False)
    ),
    "autocast": lambda model: torch.set_autocast_enabled("cuda", True),
    "a double": lambda model: model.double(),
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_what_is_not_folded_in_one_step(name: str, folding: list[str]) -> None:
    model, x = randomised(Scaled()).eval(), torch.randn(9, 4)
    with torch.no_grad():
        assert at_once_of(model, x) is not None
        UNFOLDED[name](model)
        scale = model.__dict__.get("scale", model._parameters.get("scale"))
        given = model.linear, scale, model.bn, nn.Linear, nn.BatchNorm1d
        assert at_once.folded_linear(x.double() if name == "a double" else x, *given) is None


@pytest.mark.parametrize("rows", (1, 4))
def test_few_rows_are_not_worth_a_fold(rows: int, folding: list[str]) -> None:
    with torch.no_grad():
        assert at_once_of(randomised(Scaled()).eval(), torch.randn(rows, 4)) is None


def test_vectors_of_few_rows_may_lie_anywhere(compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def affine(x: Tensor, scale: Any, *given: Any) -> None:
        *vectors, eps, out = given
        assert all(vector.is_contiguous() for vector in vectors)
        out.copy_(reference.scale_batch_norm(x, scale, *vectors, False, 0.0, eps))

    library = torch.library.Library("normswap", "IMPL")
    library.impl("affine", affine, "CPU")
    module: Any = sys.modules["normswap.ops.scale_batch_norm"]
    monkeypatch.setattr(module, "native_serves", lambda *given: True)
    x, given = torch.randn(2, 3), torch.rand(3, 4).add(0.5).unbind(1)
    torch.testing.assert_close(
        ops.scale_batch_norm(x, torch.tensor(2.0), *given), reference.scale_batch_norm(x, torch.tensor(2.0), *given)
    )
    library._destroy()


SCALES: dict[str, Any] = {"a value a channel": (3,), "a row": (1, 3), "one value": (), "none": None}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("frozen", ((), ("linear.weight", "scale"), ("linear.bias", "bn.weight", "bn.bias"), ("x",)))
def test_every_gradient_and_its_own(scale: str, frozen: tuple[str, ...], folding: list[str]) -> None:
    model, x = randomised(Scaled()).eval(), torch.randn(9, 4, requires_grad="x" not in frozen)
    if SCALES[scale] is None:
        model._parameters.pop("scale")
        model.scale = None
    else:
        model.scale = nn.Parameter(torch.randn(SCALES[scale]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    cotangent, again = torch.randn(9, 3), [torch.randn_like(t) for t in wanted]

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out, wanted, cotangent, create_graph=True)
        pairs = [(f, a) for f, a in zip(first, again, strict=True) if f.requires_grad]
        found = torch.autograd.grad([f for f, _ in pairs], wanted, [a for _, a in pairs], allow_unused=True)
        return *first, *(torch.zeros(()) if t is None or not t.any() else t for t in found)

    out = at_once_of(model, x)
    expected = model(x) if SCALES[scale] is not None else model.bn(model.linear(x))
    assert type(out.grad_fn).__name__ != type(expected.grad_fn).__name__
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out), gradients(expected), rtol=1e-4, atol=1e-4)
    assert folding == ["fold"]


def test_gradients_of_sixteen_bits(folding: list[str]) -> None:
    model, x = randomised(Scaled()).eval().bfloat16(), torch.randn(9, 4, dtype=torch.bfloat16)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    found = torch.autograd.grad(at_once_of(model, x).sum(), [*model.parameters()])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert at_once_of(model.half(), x.half()) is None  # what is made of dy^T x may leave its range
    with torch.no_grad():
        assert at_once_of(model, x.half()) is not None
