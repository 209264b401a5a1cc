"""One site on one input: PyTorch's own ops pass with every gradient and buffer, planted bugs do not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import accuracy
import pytest
import torch
import torch.nn.functional as F
from models import L1, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.criterion import error_share
from normswap.plans import REGION, Match
from normswap.proof import pieces
from normswap.proof.comparison import Comparison, Cotangent

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Case = tuple[Match, nn.Module, tuple[int, ...]]


def random_case(kind: str, rng: random.Random) -> Case:
    columns, rows = rng.choice((1, 3, 33, 128, 769, 1500)), rng.randint(1, 24)
    if kind == "layer_norm":
        return Match(kind), nn.LayerNorm(columns), (rows, columns)
    if kind == "rms_norm":
        return Match(kind), nn.RMSNorm(columns, eps=rng.choice((None, 1e-6))), (rows, columns)
    if kind == "l1_norm":
        return Match(kind, {"dim": 1}), L1(), (rows, columns)
    if kind == "group_norm":
        groups, per_group = rng.randint(1, 5), rng.randint(1, 6)
        shape = (rng.randint(1, 4), groups * per_group, rng.randint(2, 9), rng.randint(1, 9))
        return Match(kind), nn.GroupNorm(groups, groups * per_group), shape
    site = Projection(rng.randint(1, 200), rng.randint(1, 60), rng.choice((None, 0.1)))
    site.train(rng.random() < 0.5)
    return normswap.plan(site).swaps[0].match, site, (rng.randint(2, 150), site.gemm.in_features)


def compared(match: Match, site: nn.Module, x: Tensor, gradients: bool = True) -> Comparison:
    return accuracy.compared(match, site, x, gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("layer_norm", "group_norm", "rms_norm", "l1_norm", "linear_scale_batch_norm"))
def test_pytorchs_own_ops_pass(kind: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        match, site, shape = random_case(kind, rng)
        mean = rng.choice((0.0, 1.0, 100.0, 1000.0) if match.kind != REGION else (0.0, 1.0))
        x = (torch.randn(shape, dtype=torch.float64) * rng.choice((1.0, 1.0, 1e-3)) + mean).to(dtype)
        found = compared(match, randomised(site).to(dtype), x)
        assert found.problem == "" and not found.kernel_ran
        assert found.eager <= 1.0, (seed, shape, mean, found)


# --- planted bugs -------------------------------------------------------------------------------------------------


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Make the class that is installed for every kind have the given forward."""

    def planted(forward: Any) -> None:
        swapped = lambda kind, original, attributes: type("Wrong", (original,), {"forward": forward})  # noqa: E731
        monkeypatch.setattr(modules, "swapped_class", swapped)

    yield planted


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is 1% too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def forgets_bias(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, None if self.bias is None else 0 * self.bias, self.eps)


def large_eps(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3)


def gradient_off(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(Scaled.apply(x), self.normalized_shape, self.weight, self.bias, self.eps)


def weight_gradient_off(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, self.normalized_shape, Scaled.apply(self.weight), self.bias, self.eps)


def leaves_columns(self: Any, x: Tensor) -> Tensor:
    part = x[..., :-3].float()
    rstd = (part.var(-1, correction=0, keepdim=True) + self.eps).rsqrt()
    return (((x - part.mean(-1, keepdim=True)) * rstd) * self.weight + self.bias).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", (forgets_bias, large_eps, leaves_columns))
def test_wrong_outputs_fail(wrong: Any, dtype: torch.dtype, plant: Callable[[Any], None]) -> None:
    """With gradients compared too, where PyTorch's own 16-bit errors are far larger than the output's."""
    plant(wrong)
    for rows in (4, 64, 1024):
        found = compared(Match("layer_norm"), randomised(nn.LayerNorm(256)).to(dtype), torch.randn(rows, 256).to(dtype))
        assert found.problem.startswith("output: error is"), (rows, found)


@pytest.mark.parametrize("wrong", (gradient_off, weight_gradient_off))
def test_wrong_gradients_fail(wrong: Any, plant: Callable[[Any], None]) -> None:
    plant(wrong)
    found = compared(Match("layer_norm"), randomised(nn.LayerNorm(256)), torch.randn(64, 256))
    assert found.problem.startswith("gradient of ")
    assert compared(Match("layer_norm"), randomised(nn.LayerNorm(256)), torch.randn(64, 256), False).problem == ""


def test_one_pass_variance_fails(plant: Callable[[Any], None]) -> None:
    def one_pass(self: Any, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias

    plant(one_pass)
    found = compared(Match("layer_norm"), randomised(nn.LayerNorm(256)), torch.randn(8, 256) + 1000)
    assert found.problem.startswith("output: error is")


@pytest.mark.parametrize("eps", (None, 1e-6))
@pytest.mark.case("rms-eps-none")
def test_rms_norm_of_small_values(eps: float | None, plant: Callable[[Any], None]) -> None:
    """eps=None is float32's epsilon, which rules where values are small: in the referee too."""
    site, x = randomised(nn.RMSNorm(64, eps=eps)), torch.randn(8, 64) * 1e-4
    assert compared(Match("rms_norm"), site, x).eager <= 1.0
    plant(lambda self, x: 1.01 * F.rms_norm(x, self.normalized_shape, self.weight, self.eps))
    assert "output" in compared(Match("rms_norm"), site, x).problem


@pytest.mark.parametrize("rows", (24, 2048))
@pytest.mark.case("bn-unbiased-variance")
def test_biased_running_variance_fails(rows: int, plant: Callable[[Any], None]) -> None:
    def biased(self: Any, x: Tensor) -> Tensor:
        before = self.running_var.clone()
        out = nn.BatchNorm1d.forward(self, x)
        with torch.no_grad():
            batch = (self.running_var - 0.9 * before) * (len(x) - 1) / len(x)
            self.running_var = 0.9 * before + batch
        return out

    match, site, x = Match("batch_norm"), randomised(nn.BatchNorm1d(16)).train(), torch.randn(rows, 16)
    assert not compared(match, site, x, False).problem
    plant(biased)
    assert compared(match, site, x, False).problem.startswith("buffer running_var: error is")


@pytest.mark.case("bn-batches-tracked")
def test_a_counter_that_does_not_count_fails(plant: Callable[[Any], None]) -> None:
    def uncounted(self: Any, x: Tensor) -> Tensor:
        out = nn.BatchNorm1d.forward(self, x)
        self.num_batches_tracked -= 1
        return out

    plant(uncounted)
    found = compared(Match("batch_norm"), randomised(nn.BatchNorm1d(16)).train(), torch.randn(12, 16))
    assert found.problem == "buffer num_batches_tracked differs from PyTorch's"


def test_what_ours_raises_is_a_problem_and_what_pytorch_raises_is_raised(plant: Callable[[Any], None]) -> None:
    def raises(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("launch failed")

    site = nn.LayerNorm(4)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        compared(Match("layer_norm"), site, torch.randn(2, 5))
    plant(raises)
    assert compared(Match("layer_norm"), site, torch.randn(2, 4)).problem == "raises RuntimeError: launch failed"


def test_other_dtype_shape_and_missing_gradients_fail(plant: Callable[[Any], None]) -> None:
    site, x = nn.LayerNorm(4), torch.randn(2, 4)
    plant(lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight, self.bias).double())
    assert "outputs are float64 (2, 4), PyTorch's float32 (2, 4)" in compared(Match("layer_norm"), site, x).problem
    plant(lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight.detach(), self.bias))
    assert "gradients reach other tensors than PyTorch's: weight" in compared(Match("layer_norm"), site, x).problem


def test_the_cotangent_is_random_the_same_every_time_and_not_the_input() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    first, second = (Cotangent()(x) for _ in range(2))
    assert torch.equal(first, second)
    assert abs(float(torch.corrcoef(torch.stack([x.flatten(), first.flatten()]))[0, 1])) < 0.1


def test_an_error_without_a_limit_fails() -> None:
    one = torch.ones(1)
    assert error_share(one * 2, one.double(), torch.full((1,), float("nan"), dtype=torch.float64), 4.0) == float("inf")


# --- what is run, and what is left behind -------------------------------------------------------------------------


def test_nothing_is_left_behind() -> None:
    site, x = randomised(Projection(16, 8)).train(), torch.randn(12, 16)
    before, generator, given = copy.deepcopy(site.state_dict()), torch.get_rng_state(), x.clone()
    compared(normswap.plan(site).swaps[0].match, site, x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), site.state_dict().values(), strict=True))
    assert torch.equal(generator, torch.get_rng_state()) and torch.equal(given, x)
    assert all(p.grad is None for p in site.parameters())


def test_hooks_of_the_site_do_not_fire() -> None:
    site, fired = nn.LayerNorm(4), []
    site.register_forward_hook(lambda *args: fired.append(args))
    compared(Match("layer_norm"), site, torch.randn(2, 4))
    assert fired == []


@pytest.mark.parametrize("made_inside", (True, False))
def test_inference_mode(made_inside: bool) -> None:
    with torch.inference_mode(made_inside):
        site, x = randomised(nn.LayerNorm(8)), torch.randn(2, 8)
    with torch.inference_mode():
        found = compared(Match("layer_norm"), site, x)
    assert found.problem == "" and found.gradients


def test_large_inputs_are_compared_on_slices(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any], None]) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 80)
    monkeypatch.setattr(pieces, "SLICES", 4)
    site = randomised(nn.LayerNorm(8))
    for shape in ((100, 8), (1, 100, 8)):
        found = compared(Match("layer_norm"), site, torch.randn(shape))
        assert found.problem == "" and found.coverage == pytest.approx(0.4)
    assert compared(Match("layer_norm"), site, torch.randn(20, 8)).coverage == 1.0
    plant(lambda self, x: F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps) * (1 + (x > 50)))
    x = torch.randn(100, 8)
    x[-1, 0] = 99.0  # the last sample is among those compared
    assert compared(Match("layer_norm"), site, x).problem


def test_where_pytorch_overflows_it_is_reported() -> None:
    x = torch.randn(3, 64)
    x[1] = 3e38
    found = compared(Match("l1_norm", {"dim": 1}), L1(), x, False)
    assert found.problem == "" and "output: PyTorch's own error is" in found.note
    x[1, ::2] *= -1
    found = compared(Match("layer_norm"), nn.LayerNorm(64), x, False)
    assert found.problem == "" and "PyTorch's is not finite in 64 elements" in found.note


def test_elements_that_are_pytorchs_own_are_not_held_against_ours(plant: Callable[[Any], None]) -> None:
    """A row that overflows in both alike says nothing of the others, and excuses none of them."""
    match, x = Match("l1_norm", {"dim": 1}), torch.randn(3, 64)
    x[1] = 3e38
    plant(lambda self, x: (x.double() / torch.mean(torch.abs(x), dim=1, keepdim=True)).to(x.dtype))
    assert compared(match, L1(), x, False).problem == ""
    plant(lambda self, x: x / torch.mean(torch.abs(x), dim=1, keepdim=True) * (1 + 1e-5))
    assert compared(match, L1(), x, False).problem.startswith("output: error is")


def test_tf32_may_be_set_in_the_new_way(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        site = randomised(Projection(16, 8)).train()
        assert compared(normswap.plan(site).swaps[0].match, site, torch.randn(12, 16)).problem == ""
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
