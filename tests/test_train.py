"""Training a swapped model is training the model: real losses, step by step. The same on the GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import SEEDS, STEPS, TASKS, assert_learns_alike, losses, made, swapped

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More wait for one another longer than these models take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("task", TASKS)
def test_it_learns_as_the_original(task: str) -> None:
    def run(seed: int, ours: bool) -> list[float]:
        model, batches = made(task, seed, DEVICE), TASKS[task][1](seed, DEVICE)
        if ours:
            model = swapped(model, next(TASKS[task][1](seed, DEVICE))[0])
        return losses(model, batches, STEPS, DEVICE)

    assert_learns_alike(run)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.case("autocast", "optimizer-before-swap")
def test_autocast_with_an_optimizer_made_before(task: str) -> None:
    found = []
    for ours in (False, True):
        model = made(task, 0, DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if ours:
            with torch.autocast(DEVICE, torch.bfloat16):
                model = swapped(model, next(TASKS[task][1](0, DEVICE))[0])
        batches = TASKS[task][1](0, DEVICE)
        found.append(losses(model, batches, 20, DEVICE, autocast=torch.bfloat16, optimizer=optimizer))
    assert found[0] == found[1]


@pytest.mark.case("activation-checkpointing")
def test_checkpointed_blocks() -> None:
    found = []
    for again in (False, True):
        model = swapped(made("gpt", 1, DEVICE), next(TASKS["gpt"][1](1, DEVICE))[0])
        model.again = again
        found.append(losses(model, TASKS["gpt"][1](1, DEVICE), 10, DEVICE))
    assert found[0] == found[1]


def test_an_averaged_copy_is_swapped_too_and_averages() -> None:
    seed, decay = SEEDS[0], 0.9
    model = swapped(made("resnet", seed, DEVICE), next(TASKS["resnet"][1](seed, DEVICE))[0])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    expected = [p.detach().clone() for p in model.parameters()]
    first = True

    def then() -> None:
        nonlocal expected, first
        average.update_parameters(model)
        own = [p.detach() for p in model.parameters()]
        expected = (
            [p.clone() for p in own]
            if first
            else [decay * e + (1 - decay) * p for e, p in zip(expected, own, strict=True)]
        )
        first = False

    losses(model, TASKS["resnet"][1](seed, DEVICE), 8, DEVICE, then=then)
    assert type(average.module.blocks[0]) is type(model.blocks[0])
    for ours, theirs in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
