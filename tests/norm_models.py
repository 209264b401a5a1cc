"""One norm of each kind with an input, and what "the same function" means, for the tests of tests/cases.py's cases on
the CPU and on the GPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from models import L1, Projection, randomised
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import normswap

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Between two correct kernels, as a share of a tensor's largest value and of 1; gradients, which are differences of
sums, may be four times as far. The strict judge is the proof that ``swapped_copy`` asks for."""


@dataclass(frozen=True)
class Norm:
    """How to make a module of one kind, and the shape of an input for it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


NORMS: dict[str, Norm] = {
    "layer_norm": Norm(lambda: nn.LayerNorm(12), (5, 12)),
    "rms_norm": Norm(lambda: nn.RMSNorm(12, eps=1e-6), (5, 12)),
    "group_norm": Norm(lambda: nn.GroupNorm(2, 6), (4, 6, 5, 3)),
    "instance_norm": Norm(lambda: nn.InstanceNorm2d(6, affine=True), (4, 6, 5, 3)),
    "l1_norm": Norm(L1, (5, 12)),
    "linear_scale_batch_norm": Norm(lambda: Projection(7, 6), (9, 7)),
}
by_kind = pytest.mark.parametrize("kind", NORMS)


def made(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A randomised module of ``kind`` in eval mode, and an input for it."""
    norm = NORMS[kind]
    return randomised(norm.make()).eval().to(device, dtype), drawn(norm.shape, device, dtype)


def norm_in(model: Any) -> Any:
    """The module of a made one that has the norm's weight and eps."""
    return model._modules.get("bn") or model._modules.get("norm") or model


def drawn(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape).to(device, dtype)


def swapped_copy(model: nn.Module, x: Tensor | None, **options: Any) -> nn.Module:
    """``model`` swapped, with every site proved, gradients included: by our kernels where ``x`` is what they take."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        asked = {"validate": "grad", "on_mismatch": "raise", "on_empty": "raise", **options}
        swapped = normswap.optimize(model, x, min_speedup=None, **asked)
    if asked["validate"] != "off" and x is not None:
        expected = "proved" if x.is_cuda and x.dtype in DTYPES else "wiring"
        rows = [row for row in normswap.report(swapped).rows if row["status"] != "refused"]
        # Where PyTorch's output is nowhere finite there is nothing to hold ours to.
        bare = [row["name"] for row in rows if row["status"] == "unchecked" and "nowhere finite" in row["detail"]]
        found = {row["name"]: row["status"] for row in rows if row["name"] not in bare}
        assert (found or bare) and set(found.values()) <= {expected}, found
    return swapped


# --- the same results -----------------------------------------------------------------------------------------------


def results(model: nn.Module, x: Tensor, cotangent: Tensor | None = None) -> dict[str, Tensor]:
    """Output, buffers and, with a ``cotangent``, gradients of one call; neither ``x`` nor ``cotangent`` may change."""
    before = [None if t is None else t.clone() for t in (x, cotangent)]
    leaf = x.detach().requires_grad_(cotangent is not None)
    model.zero_grad()
    output = model(leaf)
    found = {"output": output.detach()}
    if cotangent is not None:
        output.backward(cotangent)
        gradients = {"input": leaf.grad, **{name: p.grad for name, p in model.named_parameters()}}
        found |= {f"gradient of {name}": g.clone() for name, g in gradients.items() if g is not None}
    for given, old in zip((x, cotangent), before, strict=True):
        assert given is None or given.isclose(old, rtol=0, atol=0, equal_nan=True).all(), "an argument was written to"
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def noise_of_order(model: nn.Module, x: Tensor, cotangent: Tensor, what: str, orders: int = 32) -> float:
    """How far from float64 PyTorch's own gradient called ``what`` lies, at worst over ``orders`` of the samples: where
    sums cancel, as behind a BatchNorm of nearly constant columns, the last bits of a sum decide."""
    model = copy.deepcopy(model)
    exact = results(copy.deepcopy(model).double(), x.double(), cotangent.double())[what]
    worst = 0.0
    for seed in range(orders):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
        found = results(model, x[order], cotangent[order])[what].double()
        worst = max(worst, float((found - (exact[order] if what == "gradient of input" else exact)).abs().max()))
    return worst


def assert_close(ours: Tensor, theirs: Tensor, what: str = "", noise: Callable[[], float] | None = None) -> None:
    """Equal shapes, dtypes, NaN and Inf, and values up to TOLERANCE, or else to four times the ``noise``."""
    tolerance = TOLERANCE.get(theirs.dtype, 0.0) * (4 if what.startswith("gradient") else 1)
    finite = theirs.detach().abs()[theirs.isfinite()]
    atol = tolerance * (max(1.0, float(finite.max())) if finite.numel() else 1.0)
    if noise is not None and not torch.allclose(ours, theirs, tolerance, atol, equal_nan=True):
        atol = max(atol, 4 * noise())
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_same_results(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    model: nn.Module,
    noise: Callable[[str], float] | None = None,
) -> None:
    """Two ``results`` of modules that compute what ``model`` does are the same; ``noise``: that of PyTorch's own
    gradient of a name."""
    assert ours.keys() == theirs.keys()
    # In 16 bits the gradient of what stands before a batch norm is rounding noise in PyTorch: only the proof can judge.
    noisy = theirs["output"].dtype in DTYPES[1:] and any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    for name, expected in theirs.items():
        if noisy and name.startswith("gradient"):
            assert (ours[name].shape, ours[name].dtype) == (expected.shape, expected.dtype)
        else:
            of_this = partial(noise, name) if noise is not None and name.startswith("gradient") else None
            assert_close(ours[name], expected, name, of_this)


def assert_alike(
    model: nn.Module, swapped: nn.Module, x: Tensor, cotangent: Tensor | None = None, *, strides: bool = True
) -> None:
    """Both compute the same from ``x``: the output with its strides, every gradient, every buffer afterwards."""
    theirs, ours = results(model, x, cotangent), results(swapped, x, cotangent)
    batches = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in model.modules())
    cancels = batches and x.dtype is torch.float32 and cotangent is not None
    noise = partial(noise_of_order, model, x, cotangent) if cancels else None
    assert_same_results(ours, theirs, model, noise)
    if strides:
        assert ours["output"].stride() == theirs["output"].stride()


def cotangent_of(model: nn.Module, x: Tensor) -> Tensor:
    """A random cotangent for ``model(x)``; its buffers stay as they are."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        output = model(x)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return drawn(tuple(output.shape), str(output.device), output.dtype)


def assert_swaps_alike(model: nn.Module, x: Tensor, *, strides: bool = True) -> None:
    """``model`` is swapped with a proof on ``x``, and then gives what it gave, with gradients and without."""
    swapped = swapped_copy(model, x)
    assert_alike(model, swapped, x, cotangent_of(model, x), strides=strides)
    with torch.no_grad():
        assert_alike(model, swapped, x, strides=strides)


def assert_same_error(ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """Both raise, the same type with the same text."""
    with pytest.raises(Exception) as expected:
        theirs()
    with pytest.raises(expected.type) as got:
        ours()
    assert type(got.value) is expected.type and str(got.value) == str(expected.value)


def assert_same_outcome(model: nn.Module, swapped: nn.Module, x: Tensor) -> None:
    """Both raise the same error for ``x``, or both compute the same from it; running statistics are compared too."""
    try:
        copy.deepcopy(model)(x)
    except Exception:
        assert_same_error(lambda: swapped(x), lambda: model(x))
    else:
        with torch.no_grad():
            assert_alike(model, swapped, x)


# --- Linear -> scale -> BatchNorm -----------------------------------------------------------------------------------

BATCH_NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum None": {"momentum": None},
    "momentum 0": {"momentum": 0.0},
    "momentum 0.3": {"momentum": 0.3},
    "affine False": {"affine": False},
    "untracked": {"track_running_stats": False},
    "bare": {"affine": False, "track_running_stats": False, "momentum": None},
}

STEPS = ("t", "e", "tt", "tet", "toe", "ft")
"""Calls in a row: in train mode, in eval mode, with the batch norm frozen in a model that trains, and with tracking
switched off."""


def projection(name: str, device: str = "cpu") -> Projection:
    """A Projection(7, 6) whose batch norm has the arguments of BATCH_NORMS[name]."""
    model = Projection(7, 6)
    model.bn = nn.BatchNorm1d(6, **BATCH_NORMS[name])
    randomised(model)
    return model.to(device)


def run_steps(model: Projection, steps: str) -> None:
    """Swap ``model`` and compare each of the ``steps``, a letter each, on fresh inputs: outputs, gradients, buffers."""
    device = str(model.scale.device)
    swapped: Any = swapped_copy(model, drawn((9, 7), device))
    for step in steps:
        for one in (model, swapped):
            one.train(step != "e")
            if step == "f":
                one.bn.eval()
            if step == "o":
                one.bn.track_running_stats = False
        x = drawn((9, 7), device)
        assert_alike(model, swapped, x, cotangent_of(model, x))
        with torch.no_grad():
            assert_alike(model, swapped, x)


# --- compile --------------------------------------------------------------------------------------------------------


def calls_of(kind: str, device: str = "cpu") -> Iterator[Tensor]:
    """Inputs of several batch sizes and, where the norm takes them, ranks: 2-D, then 4-D."""
    shape = NORMS[kind].shape
    shapes = {
        "layer_norm": [(5, 12), (7, 12), (2, 3, 5, 12)],
        "rms_norm": [(5, 12), (7, 12), (2, 3, 5, 12)],
        "group_norm": [(4, 6), (5, 6), (4, 6, 5, 3)],
        "l1_norm": [(5, 12), (7, 12), (2, 3, 5, 12)],
    }.get(kind, [shape, (11, *shape[1:]), (4, *shape[1:])])
    for shape in shapes:
        yield drawn(shape, device)


def fake_call(model: nn.Module, x: Tensor) -> Tensor:
    """The output of ``model`` for a fake of ``x``, its parameters and its buffers: nothing is computed."""
    with FakeTensorMode() as mode:
        state = {name: mode.from_tensor(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        output = torch.func.functional_call(model, state, (mode.from_tensor(x),))
    assert isinstance(output, FakeTensor)
    return output
