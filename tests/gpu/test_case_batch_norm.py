"""BatchNorm behind a Linear and a scale on the GPU: running statistics step by step as PyTorch's."""

from __future__ import annotations

import pytest
import torch
from norm_models import (
    BATCH_NORMS,
    STEPS,
    assert_alike,
    projection,
    run_steps,
    swapped_copy,
)

DEVICE = "cuda"


@pytest.mark.parametrize("name", BATCH_NORMS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.case("bn-momentum", "bn-affine-false", "bn-no-running-stats", "bn-batches-tracked", "bn-frozen")
def test_every_step_is_pytorchs(name: str, steps: str) -> None:
    run_steps(projection(name, DEVICE), steps)


@pytest.mark.case("bn-unbiased-variance")
@pytest.mark.parametrize("rows", (2, 3, 50))
def test_running_var_is_that_of_the_unbiased_variance(rows: int) -> None:
    model, x = projection("momentum 0.3", DEVICE).train(), torch.randn(rows, 7, device=DEVICE)
    swapped, old = swapped_copy(model, x), model.bn.running_var.clone()
    product = swapped.gemm(x) * swapped.scale
    swapped(x)
    torch.testing.assert_close(swapped.bn.running_var, 0.7 * old + 0.3 * product.var(0, correction=1))


@pytest.mark.case("bn-one-row")
def test_one_row_in_training_raises_and_leaves_the_statistics() -> None:
    model = projection("plain", DEVICE).train()
    swapped = swapped_copy(model, torch.randn(9, 7, device=DEVICE))
    for one in (model, swapped):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            one(torch.randn(1, 7, device=DEVICE))
    for (name, ours), theirs in zip(swapped.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    x, cotangent = torch.randn(1, 7, device=DEVICE), torch.randn(1, 6, device=DEVICE)
    assert_alike(model.eval(), swapped.eval(), x, cotangent)
