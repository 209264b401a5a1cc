"""The backward of group_norm and instance_norm on the GPU against float64, in both layouts and every way there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, gpu_of_plans, same_bits, tensor
from torch import Tensor

from normswap import ops
from normswap.activation import CODES, NONE, Activation

PAIRS = (  # dtypes of the input and of the gradient
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
)
by_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(dtype)[6:] for dtype in pair))
SHAPES = (  # input, groups: held by a block, by a cluster, by nobody; odd lengths; lines of one element
    ((2, 4), 2),
    ((3, 6, 5), 6),
    ((2, 8, 7, 7), 1),
    ((5, 10, 3, 3), 5),
    ((2, 64, 56, 56), 32),
    ((1, 320, 64, 64), 32),
    ((2, 12, 4, 5, 6), 3),
    ((2, 128, 130, 131), 4),
    ((300, 640, 2, 2), 32),
    ((1, 8, 1024, 1024), 2),
    ((6, 16, 96, 96), 4),
    ((3, 64, 49, 1), 64),
    ((2, 2048, 7, 7), 32),
    ((2, 1024, 24, 24), 1),
    ((1, 5, 3, 1001), 5),
)
REGIMES = (0, 3, 4, 5)
PASSING = 5
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
ACTIVATIONS = [
    Activation(name, *{"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}.get(name, (0.0, 0.0))) for name in CODES
]
EPS = 1e-5


@dataclass
class Case:
    """A call of the backward. ``z`` is what the activation was given, of our own forward."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    groups: int
    activation: Activation = NONE
    residual: Tensor | None = None

    @classmethod
    def drawn(
        cls,
        shape: tuple[int, ...],
        groups: int,
        pair: tuple[torch.dtype, torch.dtype],
        mean: float = 0.0,
        activation: Activation = NONE,
        behind: bool = False,
    ) -> Case:
        parameters = pair[0] if pair[0] == pair[1] else torch.float32
        return cls(
            tensor(shape, pair[1], seed=3),
            tensor(shape, pair[0], mean),
            tensor(shape[1:2], parameters, 0.5, seed=1),
            tensor(shape[1:2], parameters, seed=2),
            groups,
            activation,
            tensor(shape, pair[1], seed=4) if behind else None,
        )

    def forward(self, activation: Activation, channels_last: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """y, mean and rstd by our kernel."""
        x, residual = (placed(t, channels_last) for t in (self.x, self.residual))
        y = torch.empty_like(x, dtype=self.dy.dtype)
        mean, rstd = torch.empty(2, len(x), self.groups, device="cuda")
        after = (activation.code, activation.low, activation.high, residual)
        torch.ops.normswap.group_norm(
            x, self.weight, self.bias, self.groups, EPS, channels_last, *after, y, mean, rstd, 0
        )
        return y, mean, rstd

    def gradients(self, regime: int = 0, channels_last: bool = False) -> dict[str, Tensor]:
        y, mean, rstd = self.forward(self.activation, channels_last)
        dy, x, residual = (placed(t, channels_last) for t in (self.dy, self.x, self.residual))
        found = {"dx": torch.full_like(x, 77.0)}
        found |= {"dweight": torch.full_like(self.weight, 77.0), "dbias": torch.full_like(self.bias, 77.0)}
        if residual is not None:
            found["dresidual"] = torch.full_like(dy, 77.0)
        kept = {"none": None, "relu": y}.get(self.activation.name, residual)
        kept = None if residual is None else kept
        after = (self.activation.code, self.activation.low, self.activation.high)
        torch.ops.normswap.group_norm_backward(
            *(dy, x, self.weight, self.bias, kept, mean, rstd, self.groups, channels_last, *after),
            *(found["dx"], found["dweight"], found["dbias"], found.get("dresidual"), regime),
        )
        return found


def placed(t: Tensor | None, channels_last: bool) -> Tensor | None:
    return t.to(memory_format=LAYOUTS[t.dim()]) if t is not None and channels_last else t


def exact(case: Case, channels_last: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients in float64, and the magnitudes their sums run through; the activation's derivative is taken where
    our forward, whose rounding to 16 bits is no error of the backward, had it."""
    z, _, _ = case.forward(NONE, channels_last)
    leaf = z.double().requires_grad_()
    (slope,) = torch.autograd.grad(case.activation(leaf * 1.0).sum(), leaf)
    dy = case.dy.double()
    shape = (len(case.x), case.groups, case.x.shape[1] // case.groups, -1)
    x = case.x.double().reshape(shape)
    gain = case.weight.double().reshape(1, *shape[1:3], 1)
    rstd = (x.var((2, 3), correction=0, keepdim=True) + EPS).rsqrt()
    xhat = (x - x.mean((2, 3), keepdim=True)) * rstd
    g = (dy * slope).reshape(shape)
    roundings = 0.0 if case.activation.name == "none" else 1.0  # of the derivative
    size = (dy.abs() * (slope.abs() + roundings * (1.0 + z.double().abs()))).reshape(shape)
    far = rstd * (x.abs() + x.square().mean((2, 3), keepdim=True).sqrt())

    def dx(g: Tensor, xhat: Tensor, sign: float) -> Tensor:
        inner = g.mean((2, 3), keepdim=True) + xhat * (g * xhat).mean((2, 3), keepdim=True)
        return (rstd * (g + sign * inner)).reshape(case.x.shape)

    def sums(terms: Tensor) -> Tensor:
        return terms.sum((0, 3)).reshape(-1)

    values = {"dx": dx(g * gain, xhat, -1.0), "dweight": sums(g * xhat), "dbias": sums(g)}
    sizes = {"dx": dx(size * gain.abs(), far, 1.0), "dweight": sums(size * far), "dbias": sums(size)}
    return values | {"dresidual": g.reshape(dy.shape)}, sizes | {"dresidual": size.reshape(dy.shape)}


def check(case: Case, found: dict[str, Tensor], channels_last: bool = False) -> None:
    values, sizes = exact(case, channels_last)
    for name, ours in found.items():
        assert_within(ours, values[name], sizes[name], f"{name} {tuple(case.x.shape)} {case.groups} {case.activation}")


@by_pair
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("offset-mean")
def test_every_way_gives_the_same_accurate_bits(pair: tuple[torch.dtype, torch.dtype], mean: float) -> None:
    served = set()
    for shape, groups in SHAPES:
        case = Case.drawn(shape, groups, pair, mean)
        first = case.gradients()
        check(case, first)
        sizes = (*shape[:2], case.x[0, 0].numel(), groups)
        for regime in REGIMES[1:]:
            plan = launch_plans.group_backward_plan(
                *sizes, pair[0].itemsize, pair[1].itemsize, regime=regime, **gpu_of_plans()
            )
            if plan is None:
                continue
            served.add(regime)
            assert all(same_bits(first[n], t) for n, t in case.gradients(regime).items()), (shape, groups, regime)
    assert served == set(REGIMES[1:])


@by_pair
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("channels-last", "offset-mean")
def test_channels_last(pair: tuple[torch.dtype, torch.dtype], mean: float) -> None:
    wide = (
        ((2, 4100, 5, 5), 1),
        ((2, 21, 50, 50), 7),
        ((1, 8, 1024, 1024), 2),
        ((2, 320, 32, 32), 32),
        ((3, 72, 41, 43), 3),
        ((2, 768, 20, 20), 1),
        ((2, 2048, 9, 9), 4),
    )
    for shape, groups in (*SHAPES, *wide):
        if len(shape) not in LAYOUTS:
            continue
        case = Case.drawn(shape, groups, pair, mean)
        first = case.gradients(channels_last=True)
        check(case, first, True)
        passing = case.gradients(PASSING, channels_last=True)
        assert all(same_bits(first[n], t) for n, t in passing.items()), (shape, groups)


@by_pair
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=[*CODES])
@pytest.mark.parametrize("behind", (False, True), ids=("alone", "residual"))
@pytest.mark.case("fused-activation")
def test_activations_and_residual(pair: tuple[torch.dtype, torch.dtype], activation: Activation, behind: bool) -> None:
    for shape, groups in (((3, 12, 9, 7), 4), ((2, 64, 56, 56), 32), ((1, 8, 512, 512), 2), ((2, 30, 40, 40), 3)):
        for last in (False, True):
            case = Case.drawn(shape, groups, pair, 0.0, activation, behind)
            if activation is NONE and behind:
                continue  # its gradient is the output's
            first = case.gradients(channels_last=last)
            check(case, first, last)
            passing = case.gradients(PASSING, last)
            assert all(same_bits(first[n], t) for n, t in passing.items()), (shape, last)


@pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
def test_a_relu_lets_nothing_through_where_its_input_rounds_to_zero(last: bool) -> None:
    case = Case.drawn((2, 32, 14, 14), 4, PAIRS[1], activation=Activation("relu"))
    case.weight, case.bias = case.weight.float() * 3e-8, torch.zeros(32, device="cuda")
    z, _, _ = case.forward(NONE, last)
    assert bool((z == 0).any()) and bool((z > 0).any())
    check(case, case.gradients(channels_last=last), last)


@by_pair
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=[*CODES])
def test_the_forward_adds_the_residual_as_pytorch_does(
    pair: tuple[torch.dtype, torch.dtype], activation: Activation
) -> None:
    for shape, groups in SHAPES:
        case = Case.drawn(shape, groups, pair, 0.0, activation, True)
        for last in (False, True) if len(shape) in LAYOUTS else (False,):
            norm, _, _ = Case(case.dy, case.x, case.weight, case.bias, groups).forward(NONE, last)
            expected = activation(norm + case.residual)
            ours, _, _ = case.forward(activation, last)
            assert ours.dtype is pair[1] and ours.stride() == norm.stride()
            torch.testing.assert_close(ours, expected, rtol=2 * torch.finfo(pair[1]).eps, atol=1e-6)
            if activation.name in ("none", "relu", "clamp"):
                assert same_bits(ours, expected), (shape, last)


@pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
def test_fifty_runs_give_the_same_bits(last: bool) -> None:
    for shape, groups in (((2, 64, 56, 56), 32), ((2, 128, 130, 131), 4), ((4, 2048, 7, 7), 32)):
        for regime in (0, PASSING) if last else REGIMES:
            case = Case.drawn(shape, groups, PAIRS[1], 1.0, Activation("silu"), True)
            sizes = (*shape[:2], case.x[0, 0].numel(), groups)
            if not launch_plans.group_backward_plan(*sizes, 2, 2, regime=regime, **gpu_of_plans()):
                continue
            first = case.gradients(regime, last)
            for _ in range(49):
                again = case.gradients(regime, last)
                assert all(same_bits(first[n], again[n]) for n in first), (shape, regime)


@pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))
def test_a_sample_s_gradient_depends_on_that_sample_alone(last: bool) -> None:
    for shape, groups in (((9, 64, 56, 56), 32), ((40, 12, 5, 5), 3), ((3, 16, 300, 300), 2)):
        case = Case.drawn(shape, groups, PAIRS[0])
        alone = Case(case.dy[-1:], case.x[-1:], case.weight, case.bias, groups)
        assert same_bits(case.gradients(channels_last=last)["dx"][-1:], alone.gradients(channels_last=last)["dx"])


def test_gradients_that_are_not_asked_for_are_not_computed_and_the_rest_is_the_same() -> None:
    x, weight, bias, residual = (t.requires_grad_() for t in leaves())
    everything = (x, weight, bias, residual)
    dy = torch.randn_like(x)
    after = Activation("gelu")
    whole = torch.autograd.grad(ops.group_norm(x, 8, weight, bias, activation=after, residual=residual), everything, dy)
    for wants in itertools.product((False, True), repeat=4):
        if not any(wants):
            continue
        given = [t.detach().requires_grad_(want) for t, want in zip(everything, wants, strict=True)]
        ops.group_norm(given[0], 8, *given[1:3], activation=after, residual=given[3]).backward(dy)
        for t, want, expected in zip(given, wants, whole, strict=True):
            assert (t.grad is not None) == want
            if wants == (False, False, False, True) and want:  # that is PyTorch's, whose ops keep less
                torch.testing.assert_close(t.grad, expected, rtol=1e-4, atol=1e-5)
            else:
                assert not want or same_bits(t.grad, expected)


def leaves() -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, device="cuda") for shape in ((3, 32, 20, 20), (32,), (32,), (3, 32, 20, 20)))


@pytest.mark.case("strided-gradient", "channels-last")
def test_the_gradient_may_lie_anywhere_and_is_not_written_to() -> None:
    x, weight, bias, _ = leaves()
    wide = torch.randn(3, 32, 20, 41, device="cuda")
    gradients = (
        wide[..., 1:21],
        wide[..., ::2][..., :20],
        torch.ones((), device="cuda").expand(x.shape),
        torch.randn_like(x),
        torch.randn_like(x).to(memory_format=torch.channels_last),
    )
    for dy, layout in itertools.product(gradients, (torch.contiguous_format, torch.channels_last)):
        given = [x.to(memory_format=layout), weight, bias]
        given = [t.detach().requires_grad_() for t in given]
        before = dy.clone()
        ours = torch.autograd.grad(ops.group_norm(given[0], 8, *given[1:]), given, dy)
        theirs = torch.autograd.grad(F.group_norm(given[0], 8, *given[1:]), given, dy)
        assert torch.equal(dy, before) and ours[0].stride() == given[0].stride()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out", (torch.float32, torch.bfloat16), ids=str)
def test_autocast_reads_16_bits_and_writes_them(out: torch.dtype) -> None:
    """The result is PyTorch's float32, the gradient of any dtype, the input's in its own; no copy of it is made."""
    x = torch.randn(2, 64, 64, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    norm = torch.nn.GroupNorm(8, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = ops.group_norm(x, 8, norm.weight, norm.bias, activation=Activation("silu"))
        expected = F.silu(norm(x))
        assert y.dtype is expected.dtype is torch.float32
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = ops.group_norm(x, 8, norm.weight, norm.bias, activation=Activation("silu"))
        assert torch.cuda.max_memory_allocated() - before <= kept.numel() * 4 + 2**20
    dy = torch.randn_like(y)
    if out is torch.bfloat16:
        y, expected, dy = y.to(out), expected.to(out), dy.to(out)
    (ours,), (theirs,) = (torch.autograd.grad(one, x, dy) for one in (y, expected))
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


@pytest.mark.case("empty-batch", "non-finite-rows")
def test_what_is_not_finite_stays_in_its_group() -> None:
    for channels_last in (False, True):
        clean = Case.drawn((4, 8, 40, 40), 2, PAIRS[0])
        spoilt = Case(clean.dy.clone(), clean.x.clone(), clean.weight, clean.bias, 2)
        spoilt.x[1, 5, 3, 3] = float("nan")
        spoilt.dy[2, 0, 0, 0] = float("inf")
        ours, other = (case.gradients(channels_last=channels_last)["dx"] for case in (spoilt, clean))
        hit = torch.zeros(4, 8, 40, 40, dtype=torch.bool, device="cuda")
        hit[1, 4:], hit[2, :4] = True, True
        assert same_bits(ours[~hit], other[~hit]) and not bool(ours[hit].isfinite().any())
    empty = torch.empty(0, 4, 3, device="cuda", requires_grad=True)
    ops.group_norm(empty, 2).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 4, 3)
    weight = torch.randn(4, device="cuda", requires_grad=True)
    ops.group_norm(empty, 2, weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def faulty(fault: str) -> Callable[[Case], dict[str, Tensor]]:
    """Our gradients, gone wrong in a known way."""

    def of(case: Case) -> dict[str, Tensor]:
        found = case.gradients()
        x, gain = case.x.double().reshape(2, 4, -1), case.weight.double().view(1, -1, 1, 1)
        g = (case.dy.double() * gain).reshape(x.shape)
        rstd = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
        if fault == "a forgotten term":
            found["dx"] = found["dx"] + (rstd * g.mean(-1, keepdim=True)).expand_as(x).reshape(case.x.shape).float()
        elif fault == "a wrong eps":
            wrong = (x.var(-1, correction=0, keepdim=True) + 1e-3).rsqrt()
            found["dx"] = found["dx"] * (wrong / rstd).float().repeat(1, 1, 8).view(2, 32, 1, 1)
        elif fault == "the last columns":
            found["dx"][..., -1] = 0.0
        elif fault == "one wrong dtype":
            found["dweight"] = found["dweight"].bfloat16().to(case.weight.dtype)
        else:
            found["dbias"] = found["dbias"] - case.dy[0, :, 0, 0]
        return found

    return of


@pytest.mark.parametrize(
    "fault", ("a forgotten term", "a wrong eps", "the last columns", "one wrong dtype", "an element left out")
)
def test_planted_faults_are_found(fault: str) -> None:
    case = Case.drawn((2, 32, 24, 24), 4, PAIRS[0])
    with pytest.raises(AssertionError, match="times its limit"):
        check(case, faulty(fault)(case))
