"""BatchNorm behind a Linear and a scale: running statistics, momentum, modes, step by step as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from models import Projection, randomised
from norm_models import (
    BATCH_NORMS,
    STEPS,
    assert_alike,
    cotangent_of,
    projection,
    run_steps,
    swapped_copy,
)
from torch import nn

import normswap
from normswap import modules


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.case("bn-momentum", "bn-affine-false", "bn-no-running-stats", "bn-batches-tracked", "bn-frozen")
def test_every_step_is_pytorchs(name: str, steps: str) -> None:
    run_steps(projection(name), steps)


@pytest.mark.case("bn-no-running-stats")
def test_statistics_switched_off_and_taken_away_after_the_swap() -> None:
    model = projection("plain")
    swapped = swapped_copy(model, torch.randn(9, 7))
    x = torch.randn(9, 7)
    for change in (
        lambda bn: setattr(bn, "track_running_stats", False),
        lambda bn: setattr(bn, "num_batches_tracked", None),
        lambda bn: (setattr(bn, "running_mean", None), setattr(bn, "running_var", None)),
    ):
        for training in (True, False):
            for one in (model.train(training), swapped.train(training)):
                change(one.bn)
            assert_alike(model, swapped, x, cotangent_of(model, x))


@pytest.mark.case("bn-frozen")
def test_a_frozen_batch_norm_in_a_model_that_trains() -> None:
    model = nn.Sequential(Projection(7, 7), Projection(7, 6))
    randomised(model).train()
    model[0].bn.eval().requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in model[0].named_buffers()}
    swapped = swapped_copy(model, torch.randn(9, 7))
    assert [m.training for m in swapped.modules()] == [m.training for m in model.modules()]
    for _ in range(3):
        x = torch.randn(9, 7)
        assert_alike(model, swapped, x, cotangent_of(model, x))
    assert all(torch.equal(buffer, before[name]) for name, buffer in swapped[0].named_buffers())
    assert int(swapped[1].bn.num_batches_tracked) == 7 + 3


@pytest.mark.case("bn-unbiased-variance")
@pytest.mark.parametrize("rows", (2, 3, 50))
def test_running_var_is_that_of_the_unbiased_variance(rows: int) -> None:
    model, x = projection("momentum 0.3").train(), torch.randn(rows, 7)
    swapped, old = swapped_copy(model, x), model.bn.running_var.clone()
    product = swapped.gemm(x) * swapped.scale
    swapped(x)
    expected = 0.7 * old + 0.3 * product.var(0, correction=1)
    torch.testing.assert_close(swapped.bn.running_var, expected)
    assert not torch.allclose(swapped.bn.running_var, 0.7 * old + 0.3 * product.var(0, correction=0))


@pytest.mark.case("bn-one-row")
def test_one_row_in_training_raises_and_leaves_the_statistics() -> None:
    model = projection("plain").train()
    swapped = swapped_copy(model, torch.randn(9, 7))
    for one in (model, swapped):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            one(torch.randn(1, 7))
    for (name, ours), theirs in zip(swapped.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert_alike(model.eval(), swapped.eval(), torch.randn(1, 7), torch.randn(1, 6))


@pytest.mark.case("bn-batches-tracked", "bn-momentum")
def test_the_cumulative_average_of_our_own_module() -> None:
    """momentum None: the running mean is the mean of the batches' means."""
    ours = modules.LinearScaleBatchNorm(7, 6, momentum=None).train()
    means = []
    for _ in range(4):
        x = torch.randn(9, 7)
        means.append((ours.gemm(x) * ours.scale).mean(0))
        ours(x)
    assert int(ours.bn.num_batches_tracked) == 4
    torch.testing.assert_close(ours.bn.running_mean, torch.stack(means).mean(0))


@pytest.mark.case("bn-batches-tracked")
def test_the_proof_counts_no_batch() -> None:
    model = projection("plain").train()
    normswap.validate(swapped_copy(model, torch.randn(9, 7)), torch.randn(9, 7))
    assert int(model.bn.num_batches_tracked) == 7
