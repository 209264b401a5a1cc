"""The backward kernels of layer_norm, rms_norm and l1_norm on the GPU: every gradient against float64."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import same_bits
from models import randomised
from row_gradients import Gradient, l1_norm_gradients, layer_norm_gradients, rms_norm_gradients
from torch import Tensor, nn

import normswap
from normswap import ops, reference
from normswap.activation import CODES, Activation
from normswap.criterion import error_share
from normswap.kinds import kind_of
from normswap.plans import Match

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [(torch.float32, torch.float32), *((x, dy) for x in DTYPES[1:] for dy in (x, torch.float32))]
"""Of x and dy; float32 beside 16 bits is autocast."""
SHORT = (1, 2, 7, 8, 31, 33, 64, 65, 128, 130, 255, 256, 257, 264, 512, 769, 1000, 1001, 1024)
LONG = (1025, 2048, 4096, 4097, 5000, 8193, 12_288, 12_289, 12_296, 16_384, 25_000, 32_768, 65_535, 65_536, 98_304)
TWO_PASSES = (98_305, 131_072, 200_001)
KINDS = ("layer_norm", "rms_norm", "l1_norm")
BOUNDS = {"leaky_relu": (0.2, 0.0), "clamp": (-0.5, 0.7)}


def drawn(rows: int, cols: int, dtype: torch.dtype, mean: float, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + rows + cols)
    return (torch.randn(rows, cols, generator=generator, device="cuda") + mean).to(dtype)


def statistics(kind: str, x: Tensor) -> Tensor:
    x = x.double()
    if kind == "layer_norm":
        return torch.cat([x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt()]).float()
    return (x.abs().mean(-1) if kind == "l1_norm" else (x.square().mean(-1) + 1e-6).rsqrt()).float()


def native(kind: str, x: Tensor, w: Tensor, dy: Tensor, passes: int = 0, of: Tensor | None = None) -> list[Tensor]:
    """The native op's gradients of all there is; ``of``: the statistics, if they are known."""
    of, cols, native_ops = statistics(kind, x) if of is None else of, x.shape[-1], torch.ops.normswap
    if kind == "layer_norm":
        bias = torch.zeros_like(w)
        found = native_ops.layer_norm_backward(dy, x, w, bias, of, None, cols, 0, 0.0, 0.0, True, True, True, passes)
    elif kind == "rms_norm":
        arguments = (cols, 0.0, False, 0, 0.0, 0.0, True, True, passes)
        found = native_ops.rms_norm_backward(dy, x, w, of, None, *arguments)[:2]
    else:
        found = [native_ops.l1_norm_backward(dy, x, of, cols, 0.0, 0.0, passes)]
    return list(found)


def exact(kind: str, x: Tensor, w: Tensor, dy: Tensor) -> list[Gradient]:
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    if kind == "layer_norm":
        return layer_norm_gradients(x64, w64, dy64, 1e-5)
    if kind == "rms_norm":
        return rms_norm_gradients(x64, w64, dy64, 1e-6)
    return l1_norm_gradients(x64, dy64, 0.0, None, statistics(kind, x)[:, None].to(x.dtype).double())


def assert_right(kind: str, found: list[Tensor], expected: list[Gradient], what: object) -> None:
    for i, (ours, (value, magnitude)) in enumerate(zip(found, expected, strict=True)):
        share = error_share(ours, value, magnitude, kind_of(Match(kind)).c_gradient)
        assert share <= 1.0, f"{kind}, gradient {i}, {what}: error is {share:.3g} times its limit"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("one-element", "ragged-rows", "long-row", "dtypes")
def test_gradients_within_the_criterion(kind: str, dtype: torch.dtype, grad_dtype: torch.dtype, mean: float) -> None:
    if kind == "l1_norm" and grad_dtype is not dtype:
        return  # autocast leaves it alone
    for cols in (*SHORT, *LONG, *TWO_PASSES):
        for rows in (1, 5, 1700) if cols < 3000 else (1, 7, 150) if cols < 20_000 else (1, 7):
            x, dy = drawn(rows, cols, dtype, mean), drawn(rows, cols, grad_dtype, 0.0, seed=1)
            w = drawn(1, cols, grad_dtype, 0.5)[0]
            assert_right(kind, native(kind, x, w, dy), exact(kind, x, w, dy), (rows, cols))


@pytest.mark.parametrize("low", DTYPES[1:])
@pytest.mark.parametrize("mean", (0.0, 100.0))
@pytest.mark.case("long-row", "dtypes", "autocast")
def test_gradients_of_16_bits_have_the_bits_of_float32_s(low: torch.dtype, mean: float) -> None:
    """Of layer_norm's float32 rows."""
    for cols in (c for c in (*SHORT, *LONG, *TWO_PASSES, 98_312) if c % 8 == 0):
        for rows in (1, 5, 1700) if cols < 3000 else (1, 7, 150) if cols < 20_000 else (1, 7):
            x, dy = drawn(rows, cols, torch.float32, mean), drawn(rows, cols, low, 0.0, seed=1)
            w, of = drawn(1, cols, torch.float32, 0.5)[0], statistics("layer_norm", x)
            found = native("layer_norm", x, w, dy, of=of)
            assert_right("layer_norm", found, exact("layer_norm", x, w, dy), (rows, cols))
            for passes in (0, 2) if cols > 1024 else (0,):
                found = native("layer_norm", x, w, dy, passes, of)
                expected = native("layer_norm", x, w, dy.float(), passes, of)
                assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), (rows, cols, passes)
            unweighted = [
                torch.ops.normswap.layer_norm_backward(
                    g, x, None, None, of, None, cols, 0, 0.0, 0.0, True, False, False, 0
                )[0]
                for g in (dy, dy.float())
            ]
            assert same_bits(*unweighted), (rows, cols)


@pytest.mark.parametrize("low", DTYPES[1:])
@pytest.mark.case("strided-gradient", "misaligned")
def test_gradients_of_16_bits_of_any_strides_or_refused(low: torch.dtype) -> None:
    x, w, wide = drawn(64, 96, torch.float32, 1.0), drawn(1, 96, torch.float32, 0.5)[0], drawn(64, 200, low, 0.0)
    shifted = torch.empty(64 * 96 + 1, device="cuda", dtype=low)[1:].view(64, 96).copy_(wide[:, :96])
    for dy in (wide[:, 7:103], wide[:, ::2][:, :96], shifted, torch.ones((), device="cuda", dtype=low).expand(64, 96)):
        expected = native("layer_norm", x, w, dy.float())
        assert all(same_bits(a, b) for a, b in zip(native("layer_norm", x, w, dy), expected, strict=True))
    with pytest.raises(RuntimeError, match="grad must have the input's size"):
        native("rms_norm", x, w, shifted)
    x, w, dy = drawn(3, 12, torch.float32, 1.0), drawn(1, 12, torch.float32, 0.5)[0], drawn(3, 12, low, 0.0)
    with pytest.raises(RuntimeError, match="rows of multiples of 8"):
        native("layer_norm", x, w, dy)
    x16, other = drawn(3, 16, low, 1.0), torch.float16 if low is torch.bfloat16 else torch.bfloat16
    with pytest.raises(RuntimeError, match="grad must have the input's size"):
        native("layer_norm", x16, torch.ones_like(x16[0]), x16.to(other))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("long-row")
def test_rows_of_millions(kind: str) -> None:
    x, dy, w = (drawn(rows, 4_194_304, torch.float32, mean) for rows, mean in ((3, 5.0), (3, 0.0), (1, 0.5)))
    assert_right(kind, native(kind, x, w[0], dy), exact(kind, x, w[0], dy), x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
def test_bits_depend_on_the_row_alone(kind: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Not on the run, the other rows, or how often it is read; those of the columns not on the run either."""
    if kind == "l1_norm" and grad_dtype is not dtype:
        return
    for cols in (7, 64, 130, 257, 769, 1001, 4096, 12_289, 20_480, 65_535, 98_304):
        x, dy = drawn(33, cols, dtype, 3.0), drawn(33, cols, grad_dtype, 0.0, seed=1)
        w, of = drawn(1, cols, grad_dtype, 0.5)[0], statistics(kind, x)
        first = native(kind, x, w, dy, of=of)
        for _ in range(50):
            assert all(same_bits(a, b) for a, b in zip(first, native(kind, x, w, dy, of=of), strict=True)), cols
        if cols > 1024:
            twice = native(kind, x, w, dy, 2, of)
            assert same_bits(first[0], twice[0]), cols
            if cols > 12 * 1024:  # with fewer, more than one row of a piece is on its way at once
                assert all(same_bits(a, b) for a, b in zip(first, twice, strict=True)), cols
        for i in (0, 17, 32):
            mine = of.view(-1, 33)[:, i].contiguous()
            alone = native(kind, x[i : i + 1].clone(), w, dy[i : i + 1].clone(), of=mine)
            assert same_bits(first[0][i : i + 1], alone[0]), (cols, i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (96, 1001, 4096))
def test_activations_and_the_gradient_of_a_sum(dtype: torch.dtype, cols: int) -> None:
    x, dy, more = (drawn(37, cols, dtype, mean, seed) for seed, mean in enumerate((0.5, 0.0, 0.0)))
    w, b = drawn(2, cols, dtype, 0.5, seed=3)
    for name in CODES:
        act = Activation(name, *BOUNDS.get(name, (0.0, 0.0)))
        found = torch.ops.normswap.layer_norm_backward(
            *(dy, x, w, b, statistics("layer_norm", x), more, cols), *(act.code, act.low, act.high), True, True, True, 0
        )
        leaves = [t.double().requires_grad_() for t in (x, w, b)]
        z = F.layer_norm(leaves[0], (cols,), *leaves[1:])
        rounded = z + (F.layer_norm(x.float(), (cols,), w.float(), b.float()).to(dtype).double() - z).detach()
        total = (act(rounded) * dy.double()).sum() + (leaves[0] * more.double()).sum()
        for ours, theirs in zip(found, torch.autograd.grad(total, leaves), strict=True):
            # Where an activation has a corner, rounding may put a z on its other side: that changes single elements.
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error < (3e-3 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps), (name, float(error))


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("low", DTYPES[1:])
@pytest.mark.case("autocast", "long-row", "ragged-rows")
def test_a_residual_of_16_bits_has_a_gradient_of_its_own(kind: str, low: torch.dtype) -> None:
    for cols in (8, 96, 100, 256, 264, 768, 1001, 1004, 1280, 4096, 8192, 16_384, 65_536, 262_144):
        rows = 37 if cols < 10_000 else 3
        x, more = drawn(rows, cols, torch.float32, 0.5), drawn(rows, cols, torch.float32, 0.0, seed=2)
        residual = drawn(rows, cols, low, 0.0, seed=3)
        affine = [drawn(1, cols, torch.float32, 1.0, seed=4).view(cols) for _ in range(2 - (kind == "rms_norm"))]
        for to in ({}, {"dtype": low}) if kind == "layer_norm" else ({},):
            found = []
            for apart in (True, False):  # of 16 bits, and of float32 with the cast before the sum
                leaves = [t.detach().clone().requires_grad_() for t in (x, residual, *affine)]
                other = leaves[1] if apart else leaves[1].float()
                out, total = getattr(ops, kind)(leaves[0], (cols,), *leaves[2:], 1e-5, residual=other, **to)
                dy = drawn(rows, cols, out.dtype, 0.0, seed=5)
                found.append(torch.autograd.grad((out, total), leaves, (dy, more), retain_graph=True))
                if apart:
                    dx, *others = torch.autograd.grad(out, leaves, dy, retain_graph=True)
                    alone = torch.autograd.grad(out, leaves[1:], dy)
                    assert same_bits(others[0], dx.to(low)), (cols, to)
                    assert all(map(same_bits, alone, others)), (cols, to)
            assert all(map(same_bits, *found)), (cols, to)


def behind(kind: str, name: str, x: Tensor, w: Tensor, b: Tensor, dy: Tensor, passes: int) -> list[Tensor]:
    """The gradients of a norm with an activation and a gradient of the sum in front of it."""
    act, of, cols = Activation(name, *BOUNDS.get(name, (0.0, 0.0))), statistics(kind, x), x.shape[-1]
    more, codes, native_ops = drawn(*x.shape, x.dtype, 0.0, seed=5), (act.code, act.low, act.high), torch.ops.normswap
    if kind == "layer_norm":
        found = native_ops.layer_norm_backward(dy, x, w, b, of, more, cols, *codes, True, True, True, passes)
    else:
        found = native_ops.rms_norm_backward(dy, x, w, of, more, cols, 0.0, False, *codes, True, True, passes)[:2]
    return list(found)


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS)
@pytest.mark.case("long-row", "autocast")
def test_what_an_activation_makes_of_dy_has_the_same_bits_kept_or_made_twice(
    kind: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """A row read twice keeps nothing. Rows of 16 bits keep it in float32, but where they are ragged."""
    for name, cols in itertools.product(CODES, (1025, 1032, 4096, 4097, 12_288, 20_480, 20_481, 65_536)):
        x, dy = drawn(33, cols, dtype, 1.0), drawn(33, cols, grad_dtype, 0.0, seed=1)
        w, b = drawn(2, cols, grad_dtype, 0.5)
        first, twice = (behind(kind, name, x, w, b, dy, passes) for passes in (0, 2))
        assert same_bits(first[0], twice[0]), (name, cols)
        if cols > 12 * 1024:
            assert all(map(same_bits, first, twice)), (name, cols)
        assert all(map(same_bits, first, behind(kind, name, x, w, b, dy, 0))), (name, cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("strided-input", "misaligned", "strided-gradient", "never-writes-input")
def test_gradients_of_any_strides(dtype: torch.dtype) -> None:
    x, w = drawn(64, 96, dtype, 1.0), drawn(1, 96, dtype, 0.5)[0]
    wide = drawn(64, 200, dtype, 0.0)
    shifted = torch.empty(64 * 96 + 1, device="cuda", dtype=dtype)[1:].view(64, 96).copy_(wide[:, :96])
    ones = torch.ones((), device="cuda", dtype=dtype).expand(64, 96)
    for dy in (wide[:, 7:103], wide[:, ::2][:, :96], wide.t()[:96].clone().t(), shifted, ones):
        before = dy.clone()
        for kind in KINDS:
            expected = native(kind, x, w, before)
            assert all(same_bits(a, b) for a, b in zip(native(kind, x, w, dy), expected, strict=True))
        assert same_bits(dy, before)
    leaf = x.clone().requires_grad_()
    ops.layer_norm(leaf, (96,), w).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, native("layer_norm", x, w, ones)[0])  # whose statistics are of float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("non-finite-rows", "zero-rows")
def test_special_values_stay_in_their_row(dtype: torch.dtype) -> None:
    for cols in (33, 1024, 5000, 40_000):
        x, dy, w = drawn(6, cols, dtype, 0.0), drawn(6, cols, dtype, 0.0, seed=1), drawn(1, cols, dtype, 0.5)[0]
        x[0], x[2, 5], dy[4, 6] = 0.0, float("nan"), float("inf")
        for kind in KINDS:
            dx = native(kind, x, w, dy)[0]
            assert dx[[1, 3, 5]].isfinite().all() and not dx[2].isfinite().any(), (kind, cols)
            assert not dx[4].isfinite().all() and bool(dx[0].isfinite().all()) == (kind != "l1_norm")


def test_offsets_beyond_two_to_the_31() -> None:
    rows, cols = 2**15 + 3, 2**16
    x = torch.randn(1, cols, device="cuda").bfloat16().expand(rows, cols).contiguous()
    dy, w = x.clone(), torch.ones(cols, device="cuda").bfloat16()
    found = native("rms_norm", x, w, dy, of=torch.ones(rows, device="cuda"))
    assert same_bits(found[0], found[0][:1].expand(rows, cols))


# --- through the ops -----------------------------------------------------------------------------------------------


def called(kind: str, x: Tensor, w: Any, b: Any) -> Tensor:
    if kind == "layer_norm":
        return ops.layer_norm(x, x.shape[-1:], w, b)
    return ops.rms_norm(x, x.shape[-1:], w, 1e-6) if kind == "rms_norm" else ops.l1_norm(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), PAIRS)
def test_the_op_records_its_gradient(kind: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """For contiguous inputs by one native call, for others in steps: the same bits; of what is asked for alone."""
    x, dy = drawn(50, 768, dtype, 3.0), drawn(50, 768, dtype, 0.0, seed=1)
    w, b = drawn(2, 768, weight_dtype, 0.5)
    found = []
    for strided in (False, True):
        leaf = (torch.cat([x, x], 1)[:, :768] if strided else x.clone()).detach().requires_grad_()
        out = called(kind, leaf, w, b)
        (dx,) = torch.autograd.grad(out, leaf, dy)
        assert "Norm" in out.grad_fn.name() and out.dtype == dx.dtype == dtype
        found.append((out, dx))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    expected = exact(kind, x, w, dy)[:1]
    assert_right(kind, [found[0][1]], expected, dtype)
    if kind != "l1_norm":
        weight = w.clone().requires_grad_()
        (dw,) = torch.autograd.grad(called(kind, x, weight, b), weight, dy)
        assert_right(kind, [dw], exact(kind, x, w, dy)[1:2], dtype)


@pytest.mark.case("empty-batch")
def test_no_memory_for_the_gradient_is_pytorch_s_error() -> None:
    x = torch.randn(2**20, 24, device="cuda", requires_grad=True)
    out = ops.layer_norm(x, (24,))
    dy = torch.ones_like(out)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 1e6) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(out, x, dy)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("torch-compile")
def test_compiled(kind: str) -> None:
    x, (w, b) = drawn(20, 256, torch.float32, 0.5), drawn(2, 256, torch.float32, 0.5)
    found = []
    for function in (called, torch.compile(called, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        function(kind, *leaves).square().sum().backward()
        found.append([t.grad for t in leaves if t.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _without_a_term(args: tuple[Any, ...], found: list[Tensor]) -> list[Tensor]:
    dy, _, w, *rest = args
    rstd = next(t for t in rest if isinstance(t, Tensor) and t.dtype is torch.float32 and t.dim() <= 2)
    rows = rstd.reshape(-1)[-dy.reshape(-1, dy.shape[-1]).shape[0] :]
    return [(dy * w * rows.reshape(*dy.shape[:-1], 1)).to(dy.dtype), *found[1:]]


FAULTS: dict[str, Callable[[tuple[Any, ...], list[Tensor]], list[Tensor]]] = {
    "a forgotten term": _without_a_term,
    "a wrong eps": lambda args, found: [found[0] * (1 + 1e-4), *found[1:]],
    "the last column": lambda args, found: [
        found[0],
        found[1].index_fill(0, torch.tensor([23], device="cuda"), 0),
        *found[2:],
    ],
    "a coarse dtype": lambda args, found: [found[0].bfloat16().to(found[0].dtype), *found[1:]],
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("norm", (nn.LayerNorm, nn.RMSNorm))
def test_a_wrong_backward_is_put_back(fault: str | None, norm: type[nn.Module]) -> None:
    name = "layer_norm_backward" if norm is nn.LayerNorm else "rms_norm_backward"
    right = torch.library.get_kernel(f"normswap::{name}", "CUDA")

    def wrong(*args: Any) -> tuple[Tensor | None, ...]:
        found = [t for t in right.call_boxed(torch._C._dispatch_keys(args[0]), *args) if t is not None]
        return (*(found if fault is None else FAULTS[fault](args, found)), None)[:3]

    model = randomised(nn.Sequential(norm(24))).cuda().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        library = torch.library.Library("normswap", "IMPL")
        try:
            library.impl(name, wrong, "CUDA", allow_override=True)
            swapped = normswap.optimize(model, torch.randn(400, 24, device="cuda"), min_speedup=None)
        finally:
            library._destroy()
    assert len(normswap.report(swapped).swapped) == (1 if fault is None else 0)


@pytest.mark.parametrize(("eps", "minimum"), ((0.0, None), (1e-2, None), (0.0, 0.9), (0.1, 0.9)))
def test_l1_norm_with_a_bound(eps: float, minimum: float | None) -> None:
    x, dy = drawn(40, 1000, torch.float32, 0.0), drawn(40, 1000, torch.float32, 0.0, seed=1)
    x[::2] *= 0.5  # the mean is below the minimum
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(ops.l1_norm(leaf, -1, eps, minimum), leaf, dy)
    assert_right("l1_norm", [dx], l1_norm_gradients(x.double(), dy.double(), eps, minimum), (eps, minimum))
    (plain,) = torch.autograd.grad(reference.l1_norm(leaf, -1, eps, minimum), leaf, dy)
    torch.testing.assert_close(dx, plain)
