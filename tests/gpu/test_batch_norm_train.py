"""BatchNorm in training, and frozen with gradients, on the GPU against float64 and PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import Block, seeded
from limits import same_bits
from norm_models import BATCH_NORMS, assert_alike, assert_close, cotangent_of, swapped_copy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops
from normswap.activation import CODES, NONE, Activation

DEVICE = "cuda"
RESNET50 = ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14), (64, 2048, 7, 7))
SHAPES = (
    *((64, 7), (2, 5000), (300, 24), (5, 33, 9), (4, 64, 3000), (2, 3, 3249), (3, 2, 4097), (1, 4, 100, 100)),
    *((4, 64, 56, 56), (8, 2048, 7, 7), (3, 24, 5, 6), (2, 16, 3, 4, 5), (2, 1, 1, 1), (1, 2, 1, 3), (2, 9000, 2, 2)),
    *((900, 40), (7, 16, 64, 64), (2, 4, 420, 420)),  # held by some blocks; or in the forward alone
)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
RELU = Activation("relu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
EPS = 2.0**-24


def drawn(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) + mean).to(dtype)


def laid_out(t: Tensor, last: bool) -> Tensor:
    return t.contiguous(memory_format=LAST[t.dim()]) if last and t.dim() in LAST else t


def column(values: Tensor, like: Tensor) -> Tensor:
    return values.double().reshape(1, -1, *(1,) * (like.dim() - 2))


class Run:
    """One call with its backward: output, gradients and running statistics."""

    def __init__(self, by: Any, x: Tensor, values: list[Tensor], dy: Tensor, residual: Tensor | None, act: Any) -> None:
        mean, var, weight, bias = (v.clone() for v in values)
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        leaves = [x, weight, bias]
        if residual is not None:
            residual = residual.detach().requires_grad_()
            leaves.append(residual)
        self.y = by(x, mean, var, weight, bias, residual, act)
        self.gradients = torch.autograd.grad(self.y, leaves, dy)
        self.mean, self.var = mean, var

    def tensors(self) -> list[Tensor]:
        return [self.y, self.mean, self.var, *self.gradients]


def ours(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, act: Any) -> Tensor:
    return ops.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-3, act, residual=residual)


def theirs(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, act: Any) -> Tensor:
    out = F.batch_norm(x, mean, var, weight, bias, True, 0.3, 1e-3)
    return act(out if residual is None else out + residual)


def wide(t: Tensor | None) -> Any:
    return None if t is None else t.double()


def highest(errors: Tensor, share: float) -> Tensor:
    """What that share of them does not exceed."""
    return errors.flatten().kthvalue(max(1, int(share * errors.numel()))).values if share < 1.0 else errors.max()


def check(x: Tensor, kept: torch.dtype, act: Any = NONE, residual: Tensor | None = None) -> None:
    """Ours is at most 1.5 times as far from float64 as PyTorch's, or within what float32 and one rounding make."""
    values = [drawn((x.shape[1],), kept, m) for m in (0.2, 0.0, 1.0, 0.0)]
    values[1] = (values[1].abs() + 0.1).to(kept)
    dy = torch.empty_like(x).normal_()
    mine, eager = (Run(by, x, values, dy, residual, act) for by in (ours, theirs))
    exact = Run(theirs, wide(x), [v.double() for v in values], wide(dy), wide(residual), act)
    names = ("y", "mean", "var", "dx", "dweight", "dbias", "dresidual")
    dense = x.movedim(1, 0).flatten(1).double()
    size = float((dense.abs().amax(1) / (dense.var(1, correction=0) + 1e-3).sqrt()).max()) + 4.0
    for name, a, b, c in zip(names, mine.tensors(), eager.tensors(), exact.tensors(), strict=False):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), name
        eps = torch.finfo(a.dtype).eps
        scale = max(float(c.detach().abs().max()), float(x.abs().max()) if name in ("mean", "var") else 0.0, 1e-3)
        rough = act is not NONE and name.startswith("d")  # who is on which side of a corner
        error, other = ((t.detach().double() - c.detach()).abs() for t in (a, b))
        worst = [float(highest(e, 0.999 if rough else 1.0)) for e in (error, other)]
        limit = 1.5 * worst[1] + eps * scale + 64 * EPS * scale * size
        assert worst[0] <= limit, (name, worst, limit)
    assert mine.y.stride() == x.stride()
    again = Run(ours, x, values, dy, residual, act)
    assert all(same_bits(a, b) for a, b in zip(mine.tensors(), again.tensors(), strict=True))


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_pytorchs_error(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    for mean in (0.0, 100.0, 1000.0):
        x = laid_out(drawn(shape, dtype, mean), last)
        for kept in {dtype, torch.float32}:
            check(x, kept)


@by_dtype
@by_layout
@pytest.mark.parametrize("behind", ("nothing", "relu", "relu and residual", "silu"))
def test_gradients_asked_for_alone_have_the_same_bits(behind: str, dtype: torch.dtype, last: bool) -> None:
    """Of the parameters without the input's, and the other way round."""
    torch.manual_seed(0)
    act = {"nothing": NONE, "silu": Activation("silu")}.get(behind, RELU)
    for shape in ((4, 64, 9, 7), (3, 48, 14, 14), (2, 24, 60, 60)):
        x, residual, dy = (laid_out(drawn(shape, dtype), last) for _ in range(3))
        weight, bias = (drawn((shape[1],), dtype, m) for m in (1.0, 0.0))
        found = []
        for of_input, of_parameters in ((True, True), (True, False), (False, True)):
            image, added = (t.clone().requires_grad_(of_input) for t in (x, residual))
            w, b = (t.clone().requires_grad_(of_parameters) for t in (weight, bias))
            more = added if "residual" in behind else None
            y = ours(image, None, None, w, b, more, act)
            of = [t for t in (image, w, b, more) if t is not None and t.requires_grad]
            found.append(list(torch.autograd.grad(y, of, dy)))
        both, inputs, parameters = found
        assert all(map(same_bits, [both[0], *both[3:]], inputs)), shape
        assert all(map(same_bits, both[1:3], parameters)), shape


@by_dtype
@by_layout
@pytest.mark.parametrize("shape", RESNET50, ids=str)
def test_resnets_with_relu_and_residual(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    shape = (8, *shape[1:])
    x, residual = (laid_out(drawn(shape, dtype), last) for _ in range(2))
    check(x, torch.float32)
    check(x, torch.float32, RELU)
    check(x, torch.float32, RELU, residual)


@by_dtype
@by_layout
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("training", (True, False), ids=("training", "frozen"))
@pytest.mark.case("bn-frozen")
def test_every_activation(name: str, training: bool, dtype: torch.dtype, last: bool) -> None:
    torch.manual_seed(0)
    act = Activation(name, *{"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}.get(name, (0.0, 0.0)))
    for shape in ((3, 24, 9, 7), (2, 3, 66, 64)):
        x, residual = (laid_out(drawn(shape, dtype), last) for _ in range(2))
        mean, var, weight, bias = (drawn((shape[1],), torch.float32) for _ in range(4))
        dy, var = torch.empty_like(x).normal_(), var.abs() + 0.5
        for behind in (None, residual):
            given = [t.requires_grad_() for t in (x, weight, bias, *([] if behind is None else [behind]))]
            stats = [mean.clone(), var.clone()], [mean.clone(), var.clone()]
            ours = ops.batch_norm(x, *stats[0], weight, bias, training, 0.3, 1e-3, act, residual=behind)
            out = F.batch_norm(x, *stats[1], weight, bias, training, 0.3, 1e-3)
            expected = act(out if behind is None else out + behind)
            found, eager = (torch.autograd.grad(y, given, dy) for y in (ours, expected))
            assert ours.grad_fn.name() == "_BatchNormBackward"
            step = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(ours, expected, rtol=step, atol=step)
            for a, b in zip((*stats[0], *found), (*stats[1], *eager), strict=True):
                if name == "relu" or (dtype is not torch.float32 and a.dim() > 1):  # at a corner, or 16 bits in between
                    off = highest((a - b).double().abs(), 0.99)
                    assert off <= 40 * step * float(b.abs().max()), (float(off), a.shape)
                else:
                    torch.testing.assert_close(a, b, rtol=64 * step, atol=64 * step * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("shape", ((12, 100), (26, 257), (40, 257), (300, 24), (1000, 64), (9, 2000)), ids=str)
def test_an_outlier_in_front_costs_no_digits(shape: tuple[int, int]) -> None:
    x = drawn(shape, torch.float32)
    x[0] = 30.0
    mean, var = torch.zeros(shape[1], device=DEVICE), torch.zeros(shape[1], device=DEVICE)
    ops.batch_norm(x, mean, var, None, None, True, 1.0, 1e-5)
    exact = x.double()
    assert float(((mean - exact.mean(0)) / exact.square().mean(0).sqrt()).abs().max()) <= 2 * EPS
    assert float(((var - exact.var(0)) / exact.var(0)).abs().max()) <= 8 * EPS


@pytest.mark.parametrize("name", ("silu", "gelu", "gelu_tanh", "hardswish", "sigmoid", "tanh"))
@by_dtype
@pytest.mark.parametrize("shape", ((5, 64), (19, 33), (3, 8, 5, 5)), ids=str)
def test_where_no_row_is_nothing_is_added(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Of a constant channel z at an x of zero, where no row is, overflows float16, and its slope is NaN."""
    x, act = torch.full(shape, 300.0, device=DEVICE, dtype=dtype), Activation(name)
    weight, bias = torch.ones(2, shape[1], device=DEVICE, dtype=dtype).unbind()
    dy = drawn(shape, dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = ops.batch_norm(leaves[0], None, None, *leaves[1:], True, 0.1, 1e-6, act)
    for gradient in torch.autograd.grad(y, leaves, dy):
        assert gradient.isfinite().all()


@by_dtype
@pytest.mark.case("strided-gradient", "misaligned", "channels-last", "strided-input", "never-writes-input")
def test_gradients_and_inputs_of_any_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = (4, 6, 5, 7)
    flat = drawn((4 * 6 * 5 * 7 + 1,), dtype)
    aligned = flat[1:].view(shape).clone()
    last = aligned.contiguous(memory_format=torch.channels_last)
    wide = drawn((4, 12, 5, 7), dtype)
    cotangents = (
        wide[:, ::2],
        torch.ones((), device=DEVICE, dtype=dtype).expand(shape),
        wide[:, :6].mT.contiguous().mT,
    )
    cotangents = (*cotangents, drawn((4 * 6 * 35 + 1,), dtype)[1:].view(shape), last.clone())
    for given in (aligned, last, flat[1:].view(shape)):
        for dy in cotangents:
            kept = given.clone(), dy.clone()
            x = given.detach().requires_grad_()
            ours = ops.batch_norm(x, training=True, activation=RELU)
            assert ours.stride() == x.stride()
            (found,) = torch.autograd.grad(ours, x, dy)
            (same,) = torch.autograd.grad(ops.batch_norm(x, training=True, activation=RELU), x, dy.clone())
            (theirs,) = torch.autograd.grad(F.relu(F.batch_norm(x, None, None, training=True)), x, dy)
            assert same_bits(found, same) and found.stride() == x.stride()
            assert float((found - theirs).abs().max()) <= 64 * torch.finfo(dtype).eps
            assert same_bits(x.detach(), kept[0]) and same_bits(dy, kept[1])
    for x in (aligned.mT, aligned[:, :, ::2], aligned[:1].expand(3, -1, -1, -1)):
        torch.testing.assert_close(ops.batch_norm(x, training=True), F.batch_norm(x, None, None, training=True))


@by_dtype
@pytest.mark.case("bn-batches-tracked", "bn-one-row", "cuda-graph", "no-grad-inference")
def test_statistics_are_updated_once_and_captured(dtype: torch.dtype) -> None:
    x = drawn((16, 24, 9, 7), dtype, 3.0)
    mean, var = torch.zeros(24, device=DEVICE), torch.ones(24, device=DEVICE)
    tracked, once = torch.tensor(7, device=DEVICE), (mean.clone(), var.clone())
    F.batch_norm(x, *once, training=True, momentum=0.3)
    ops.batch_norm(x, mean, var, training=True, momentum=0.3, num_batches_tracked=tracked)
    torch.testing.assert_close((mean, var), once)
    assert int(tracked) == 8
    with torch.inference_mode():
        ops.batch_norm(x, mean, var, training=True, momentum=0.3, num_batches_tracked=tracked)
    assert int(tracked) == 9
    for bad in (x[:1, :, :1, :1], x[:0]):
        outcomes = []
        for function in (ops.batch_norm, F.batch_norm):
            try:
                outcomes.append(str(function(bad, None, None, training=True).shape))
            except (ValueError, RuntimeError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.batch_norm(x, mean, var, training=True, momentum=0.3, num_batches_tracked=tracked)
    for _ in range(3):
        graph.replay()
    assert int(tracked) == 12
    assert same_bits(captured, ops.batch_norm(x, training=True))


@pytest.mark.parametrize("settings", BATCH_NORMS)
@pytest.mark.parametrize("dims", (2, 3, 4, 5))
@pytest.mark.case("bn-momentum", "bn-affine-false", "bn-no-running-stats", "bn-frozen", "region")
def test_modules_and_regions_step_by_step(dims: int, settings: str) -> None:
    torch.manual_seed(0)
    shape = {2: (9, 6), 3: (4, 6, 5), 4: (3, 6, 5, 4), 5: (2, 6, 3, 4, 2)}[dims]
    model: Any = seeded(Block(dims, **BATCH_NORMS[settings])).to(DEVICE).train()
    swapped: Any = swapped_copy(model, torch.randn(shape, device=DEVICE))
    for step in "tettoef":
        for one in (model, swapped):
            one.train(step != "e")
            for norm in one.norms() if step in "fo" else ():
                norm.train(step != "f")
                norm.track_running_stats = norm.track_running_stats and step != "o"
        x = torch.randn(shape, device=DEVICE)
        assert_alike(model, swapped, x, cotangent_of(model, x))
        with torch.no_grad():
            assert_alike(model, swapped, x)


@pytest.mark.parametrize("lower", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.case("autocast", "mixed-weights")
def test_a_training_block_under_autocast(lower: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), seeded(Block(4)), nn.Conv2d(6, 8, 3))
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    x = torch.randn(8, 3, 16, 16, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", lower):
        fast = normswap.optimize(model, x, min_speedup=None, validate="grad")
        assert {row["status"] for row in normswap.report(fast).rows} == {"proved"}
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            ours = fast(x)
        theirs = model(x)
    assert sum("batch_apply" in event.name or "batch_held" in event.name for event in seen.events()) == 3
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
    assert_close(fast[1].bn.running_mean, model[1].bn.running_mean, "running mean")
    assert int(fast[1].bn.num_batches_tracked) == int(model[1].bn.num_batches_tracked)
