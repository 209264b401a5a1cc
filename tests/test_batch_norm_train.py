"""BatchNorm in training, and frozen with gradients, on a CPU: the op, its gradients by the formulas of the kernels, the
modules and the regions that call it."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import batch_norm_stand_in
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import CLASSES, Block, seeded
from norm_models import (
    BATCH_NORMS,
    assert_alike,
    assert_close,
    assert_same_outcome,
    assert_same_results,
    cotangent_of,
    noise_of_order,
    results,
    swapped_copy,
)
from torch import Tensor, nn

import normswap
from normswap import modules, ops
from normswap.activation import CODES, Activation

PARAMETERS = {"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}
ACTIVATIONS = [Activation(name, *PARAMETERS.get(name, (0.0, 0.0))) for name in CODES]
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=[*CODES])
SHAPES = {"rows": (9, 6), "lines": (4, 6, 5), "images": (3, 6, 5, 4), "volumes": (2, 6, 3, 4, 2)}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=[*SHAPES])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return batch_norm_stand_in.install(monkeypatch)


def values(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Running mean and variance, weight and bias."""
    return [torch.randn(6, dtype=dtype), torch.rand(6, dtype=dtype) + 0.5, *(torch.randn(2, 6, dtype=dtype).unbind())]


# --- the op -------------------------------------------------------------------------------------------------------


@by_activation
@by_shape
@pytest.mark.parametrize("training", (True, False), ids=("training", "frozen"))
@pytest.mark.parametrize("behind", (False, True), ids=("alone", "residual"))
@pytest.mark.case("bn-frozen", "bn-unbiased-variance", "bn-batches-tracked")
def test_it_is_pytorchs_composition_with_its_gradients(
    shape: tuple[int, ...], training: bool, behind: bool, activation: Activation, calls: list[str]
) -> None:
    x, residual, dy, direction = (torch.randn(shape) for _ in range(4))
    mean, var, weight, bias = values()
    tracked = torch.tensor(7)
    given = [t.requires_grad_() for t in (x, weight, bias, *([residual] if behind else []))]
    stats, same = [mean.clone(), var.clone()], [mean.clone(), var.clone()]
    ours = ops.batch_norm(
        *(x, *stats, weight, bias, training, 0.3, 1e-3, activation),
        residual=residual if behind else None,
        num_batches_tracked=tracked,
    )
    normalised = F.batch_norm(x, *same, weight, bias, training, 0.3, 1e-3)
    theirs = activation(normalised + residual if behind else normalised)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(stats, same)
    assert int(tracked) == (8 if training else 7)
    found, expected = (torch.autograd.grad(out, given, dy, create_graph=True) for out in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        again = torch.autograd.grad(
            ops_again(x, stats, weight, bias, training, activation, residual, behind), given, dy
        )
    assert calls.count("batch_norm_recorded") == 2
    torch.testing.assert_close(again, tuple(t.detach() for t in expected), rtol=1e-4, atol=1e-4)
    twice, seconds = (torch.autograd.grad(grads[0], x, direction, allow_unused=True)[0] for grads in (found, expected))
    ours, theirs = (torch.zeros_like(x) if second is None else second for second in (twice, seconds))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def ops_again(
    x: Any, stats: Any, weight: Any, bias: Any, training: bool, act: Any, residual: Any, behind: bool
) -> Tensor:
    with torch.enable_grad():
        added = residual if behind else None
        return ops.batch_norm(x, *stats, weight, bias, training, 0.0, 1e-3, act, residual=added)


@pytest.mark.parametrize("training", (True, False), ids=("training", "frozen"))
@pytest.mark.parametrize("eps", (0.0, -1e-3))
def test_an_eps_that_pytorch_refuses_is_refused(eps: float, training: bool, calls: list[str]) -> None:
    """Which it is from torch 2.13 on."""
    x, outcomes = torch.randn(5, 6, requires_grad=True), []
    for function in (ops.batch_norm, F.batch_norm):
        try:
            outcomes.append(function(x, *values(), training, 0.1, eps).shape)
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@by_activation
@pytest.mark.parametrize("training", (True, False), ids=("training", "frozen"))
def test_formulas_of_the_backward(training: bool, activation: Activation, calls: list[str]) -> None:
    x, residual = (torch.randn(3, 6, 4, dtype=torch.float64) for _ in range(2))
    mean, var, weight, bias = values(torch.float64)
    for behind in (False, True):

        def function(x: Tensor, w: Tensor, b: Tensor, r: Tensor, behind: bool = behind) -> Tensor:
            added = r if behind else None
            stats = (mean.clone(), var.clone())
            return ops.batch_norm(x, *stats, w, b, training, 0.1, 1e-3, activation, residual=added)

        inputs = tuple(t.clone().requires_grad_() for t in (x, weight, bias, residual))
        assert torch.autograd.gradcheck(function, inputs, check_undefined_grad=False)
    assert "batch_norm_backward" in calls


def test_only_the_gradients_asked_for(calls: list[str]) -> None:
    mean, var, weight, bias = values()
    tensors = (torch.randn(5, 6), weight, bias, torch.randn(5, 6))
    for wanted in range(1, 16):
        leaves = [t.clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(tensors)]
        x, w, b, r = leaves
        out = ops.batch_norm(x, mean, var, w, b, True, 0.1, 1e-3, Activation("relu"), residual=r)
        theirs = F.relu(F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3) + r)
        asked, dy = [t for t in leaves if t.requires_grad], torch.randn(5, 6)
        pairs = zip(torch.autograd.grad(out, asked, dy), torch.autograd.grad(theirs, asked, dy), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.case("strided-gradient", "channels-last", "never-writes-input")
def test_gradients_of_any_layout(calls: list[str]) -> None:
    x = torch.randn(3, 6, 5, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    wide = torch.randn(3, 12, 5, 4)
    for dy in (
        wide[:, ::2],
        torch.ones(()).expand(3, 6, 5, 4),
        wide[:, :6].transpose(2, 3).contiguous().transpose(2, 3),
    ):
        before = dy.clone()
        out, theirs = ops.batch_norm(x, training=True), F.batch_norm(x, None, None, training=True)
        ours, expected = (torch.autograd.grad(y, x, dy)[0] for y in (out, theirs))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert ours.stride() == x.stride() and torch.equal(dy, before)


@pytest.mark.case("bn-one-row", "one-value-per-channel", "empty-batch", "bad-shapes", "functorch", "forward-mode-ad")
def test_what_pytorch_refuses_or_transforms(calls: list[str]) -> None:
    for shape in ((1, 6), (1, 6, 1), (0, 6), (0, 6, 2)):
        outcomes = []
        for function in (ops.batch_norm, F.batch_norm):
            try:
                outcomes.append(str(function(torch.randn(shape), None, None, training=True).shape))
            except (ValueError, RuntimeError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        assert outcomes[0] == outcomes[1]
    x, v = torch.randn(5, 6), torch.randn(5, 6)
    ours, theirs = (
        torch.func.jvp(lambda x, f=f: f(x, None, None, None, None, True), (x,), (v,))
        for f in (ops.batch_norm, F.batch_norm)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.case("double-backward")
def test_a_graph_of_gradients_where_one_tensor_is_computed_from_another(calls: list[str]) -> None:
    """The input of a norm from the residual behind it, as in any residual block, or from its own weight."""
    x, weight, bias = torch.randn(5, 6), torch.rand(6) + 0.5, torch.randn(6)
    found = []
    for norm in (ops.batch_norm, None):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        input, (w, b) = leaves[0].exp() * leaves[1], leaves[1:]
        if norm is None:
            out = F.silu(F.batch_norm(input, None, None, w, b, True) + leaves[0])
        else:
            out = norm(input, None, None, w, b, True, 0.1, 1e-5, Activation("silu"), residual=leaves[0])
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)))
    assert "batch_norm_recorded" in calls
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


# --- modules and regions ------------------------------------------------------------------------------------------


def kinds(model: nn.Module) -> dict[str, str]:
    return {swap.site.name: swap.match.kind for swap in normswap.plan(model).swaps}


@by_shape
def test_sites_in_training(shape: tuple[int, ...]) -> None:
    model = Block(len(shape))
    regions = {"": "region", "run": "region"}
    assert kinds(model.train()) == regions | dict.fromkeys(("bn", "alone", "run.0"), "batch_norm")
    assert kinds(model.eval()) == regions
    assert kinds(nn.Sequential(nn.SyncBatchNorm(6)).train()) == {}


@by_shape
@pytest.mark.parametrize("settings", BATCH_NORMS)
@pytest.mark.parametrize("steps", ("tettf", "toe"))
@pytest.mark.case("bn-momentum", "bn-affine-false", "bn-no-running-stats", "bn-batches-tracked", "bn-frozen", "region")
def test_every_step_is_pytorchs(shape: tuple[int, ...], settings: str, steps: str) -> None:
    model: Any = seeded(Block(len(shape), **BATCH_NORMS[settings])).train()
    swapped: Any = swapped_copy(model, torch.randn(shape))
    for step in steps:
        for one in (model, swapped):
            one.train(step != "e")
            for norm in one.norms() if step in "fo" else ():
                norm.train(step != "f")
                norm.track_running_stats = norm.track_running_stats and step != "o"
        x = torch.randn(shape)
        assert_alike(model, swapped, x, cotangent_of(model, x))
        with torch.no_grad():
            assert_alike(model, swapped, x)


@pytest.mark.parametrize("seed", (345, 2299))
def test_where_sums_cancel_gradients_are_held_to_the_noise_of_pytorchs(seed: int, calls: list[str]) -> None:
    """A ReLU that leaves a column nearly constant: the float32 gradients of either are off by more than TOLERANCE."""
    torch.manual_seed(seed)
    model = seeded(Block(2)).train()
    x, dy = torch.randn(9, 6), torch.randn(9, 6)
    swapped = normswap.apply(model, normswap.plan(model))
    assert_alike(model, swapped, x, dy)
    name = "gradient of input"
    with pytest.raises(AssertionError, match=name):
        assert_close(results(swapped, x, dy)[name], results(model, x, dy)[name], name)


@pytest.mark.parametrize("name", ("gradient of input", "gradient of bn.weight"))
def test_that_noise_hides_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, dy) = seeded(Block(2)).train(), torch.randn(2, 9, 6).unbind()
    theirs = results(model, x, dy)
    wrong = {**theirs, name: theirs[name] * 1.002}
    with pytest.raises(AssertionError, match=name):
        assert_same_results(wrong, theirs, model, partial(noise_of_order, model, x, dy))


@pytest.mark.case("bn-no-running-stats", "attributes-changed-later")
def test_statistics_taken_away_and_settings_changed_after_the_swap() -> None:
    model: Any = seeded(Block(4)).train()
    swapped: Any = swapped_copy(model, torch.randn(3, 6, 5, 4))
    for change in (
        lambda bn: setattr(bn, "momentum", None),
        lambda bn: setattr(bn, "eps", 0.5),
        lambda bn: setattr(bn, "num_batches_tracked", None),
        lambda bn: setattr(bn, "weight", None),
        lambda bn: (setattr(bn, "running_mean", None), setattr(bn, "running_var", None)),
    ):
        for one in (model, swapped):
            for norm in one.norms():
                change(norm)
        for training in (True, False):
            model.train(training), swapped.train(training)
            x = torch.randn(3, 6, 5, 4)
            assert_alike(model, swapped, x, cotangent_of(model, x))


@pytest.mark.case("bn-one-row", "bad-shapes", "bn-batches-tracked")
def test_errors_are_pytorchs_and_so_are_the_statistics_after_them() -> None:
    for shape in SHAPES.values():
        model: Any = seeded(nn.Sequential(CLASSES[len(shape)](6))).train()
        swapped: Any = swapped_copy(model, torch.randn(shape))
        assert modules.site_match(swapped[0]) is not None
        one = (1, 6, *(1,) * (len(shape) - 2))
        for bad in (one, (2, 5, *shape[2:]), (*shape, 2), (6,), (0, *shape[1:])):
            assert_same_outcome(model, swapped, torch.randn(bad))
        assert_alike(model, swapped, torch.randn(shape))


class Shared(nn.Module):
    """One BatchNorm at two places of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(F.relu(self.bn(x)) * 2.0))


@pytest.mark.case("shared-module")
def test_one_norm_used_twice_in_a_step() -> None:
    model = seeded(Shared()).train()
    swapped = swapped_copy(model, torch.randn(3, 6, 5, 4))
    for _ in range(3):
        x = torch.randn(3, 6, 5, 4)
        assert_alike(model, swapped, x, cotangent_of(model, x))
    assert int(swapped.bn.num_batches_tracked) == 7 + 3 * 2


@pytest.mark.case("bn-frozen", "frozen-parameters")
def test_a_frozen_norm_in_a_model_that_trains() -> None:
    model: Any = seeded(Block(4)).train()
    for norm in model.norms()[:2]:
        norm.eval().requires_grad_(False)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if not name.startswith("run")}
    swapped: Any = swapped_copy(model, torch.randn(3, 6, 5, 4))
    assert [m.training for m in swapped.modules()] == [m.training for m in model.modules()]
    for _ in range(3):
        x = torch.randn(3, 6, 5, 4)
        assert_alike(model, swapped, x, cotangent_of(model, x))
    assert all(torch.equal(buffer, kept[n]) for n, buffer in swapped.named_buffers() if n in kept)


@pytest.mark.case("sync-batch-norm", "later-sync-batch-norm")
def test_conversion_to_sync_batch_norm_before_and_after() -> None:
    model: Any = seeded(Block(4)).train()
    before = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert set(kinds(before).values()) <= {"region"} and "bn" not in str(kinds(before))
    after = nn.SyncBatchNorm.convert_sync_batchnorm(swapped_copy(model, torch.randn(3, 6, 5, 4)))
    assert all(type(norm) is nn.SyncBatchNorm for norm in after.norms())
    x = torch.randn(3, 6, 5, 4)
    assert_alike(model.eval(), after.eval(), x)


def test_ten_steps_track_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), seeded(Block(4)), nn.Flatten(), nn.Linear(6 * 36, 4)).train()
    swapped = swapped_copy(model, torch.randn(5, 3, 8, 8))
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in (model, swapped)]
    for _ in range(10):
        x, y = torch.randn(5, 3, 8, 8), torch.randint(0, 4, (5,))
        for one, optimizer in zip((model, swapped), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(one(x), y).backward()
            optimizer.step()
    for (name, ours), theirs in zip(swapped.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


# --- the proof ----------------------------------------------------------------------------------------------------

FAULTS = {
    "biased variance": lambda out, x, mean, var, m: var.sub_(m * x.var((0, 2, 3)) / (x.numel() // x.shape[1])),
    "forgotten running mean": lambda out, x, mean, var, m: mean.sub_(m * x.mean((0, 2, 3))),
    "updated twice": lambda out, x, mean, var, m: mean.lerp_(x.mean((0, 2, 3)), m),
}


@pytest.mark.parametrize("fault", (*FAULTS, "counted twice", "output", "gradient"))
def test_planted_faults_are_put_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.batch_norm

    def wrong(x: Tensor, mean: Any, var: Any, *rest: Any, num_batches_tracked: Any = None, **given: Any) -> Tensor:
        out = real(x, mean, var, *rest, num_batches_tracked=num_batches_tracked, **given)
        with torch.no_grad():
            if fault in FAULTS:
                FAULTS[fault](out, x, mean, var, rest[3])
            elif fault == "counted twice":
                num_batches_tracked.add_(1)
        if fault == "gradient" and out.requires_grad:
            out = out.detach() + 1.001 * (out - out.detach())
        return out * 1.001 if fault == "output" else out

    monkeypatch.setattr(ops, "batch_norm", wrong)
    model: Any = seeded(Block(4)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = normswap.optimize(model, torch.randn(3, 6, 5, 4), min_speedup=None, validate="grad")
    rows = {row["name"]: row["status"] for row in normswap.report(fast).rows}
    assert set(rows.values()) == {"failed"}, rows
    assert normswap.report(fast).swapped == ()
    assert all(torch.equal(buffer, before[name]) for name, buffer in fast.named_buffers())


def test_no_trace_of_the_proof() -> None:
    model: Any = seeded(Block(4)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fast = swapped_copy(model, torch.randn(3, 6, 5, 4))
    normswap.validate(fast, torch.randn(3, 6, 5, 4))
    for one in (model, fast):
        assert all(torch.equal(buffer, before[name]) for name, buffer in one.named_buffers())


def test_the_running_statistics_and_the_count_change_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = seeded(Block(4)).train()
    fast: Any = swapped_copy(model, torch.randn(3, 6, 5, 4))
    ran: list[int] = []
    real = ops.batch_norm
    monkeypatch.setattr(ops, "batch_norm", lambda *a, **k: ran.append(1) or real(*a, **k))
    fast(torch.randn(3, 6, 5, 4))
    assert len(ran) == 3
    assert [int(norm.num_batches_tracked) for norm in fast.norms()] == [8, 8, 8]
