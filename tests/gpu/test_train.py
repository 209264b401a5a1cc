"""Training a swapped model is training the model, with what training scripts use: losses step by step on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from training import STEPS, TASKS, assert_learns_alike, losses, made, swapped

DEVICE = "cuda"


def started(task: str, seed: int, ours: bool, autocast: torch.dtype | None) -> torch.nn.Module:
    model, (x, _) = made(task, seed, DEVICE), next(TASKS[task][1](seed, DEVICE))
    if ours:
        with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
            model = swapped(model, x)
    return model


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("autocast", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.case("autocast")
def test_it_learns_as_the_original(
    task: str, autocast: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """Under autocast, with a GradScaler and clipped gradients where that is of float16."""

    def run(seed: int, ours: bool) -> list[float]:
        scaler = torch.amp.GradScaler(DEVICE) if autocast is torch.float16 else None
        model = started(task, seed, ours, autocast)
        return losses(model, TASKS[task][1](seed, DEVICE), STEPS, DEVICE, autocast=autocast, scaler=scaler)

    for name, value in assert_learns_alike(run).items():
        record_property(name, value)


@pytest.mark.parametrize("autocast", (None, torch.bfloat16), ids=str)
@pytest.mark.case("activation-checkpointing")
def test_checkpointed_blocks_learn_bit_for_bit(autocast: torch.dtype | None) -> None:
    found = []
    for again in (False, True):
        model = started("gpt", 1, True, autocast)
        model.again = again
        found.append(losses(model, TASKS["gpt"][1](1, DEVICE), 20, DEVICE, autocast=autocast))
    assert found[0] == found[1]


@pytest.mark.case("pickle-deepcopy")
def test_an_averaged_copy_follows_and_runs_our_kernels() -> None:
    model = started("resnet", 0, True, torch.bfloat16)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    batches = TASKS["resnet"][1](0, DEVICE)
    losses(model, batches, 30, DEVICE, autocast=torch.bfloat16, then=lambda: average.update_parameters(model))
    x, _ = next(batches)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = average(x)
    names = {event.name for event in profiled.events()}
    assert any(name.startswith("normswap::group_norm") for name in names) and "aten::native_group_norm" not in names
    plain = made("resnet", 0, DEVICE)
    plain.load_state_dict(average.module.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(found, plain(x), rtol=1e-2, atol=1e-2)
    assert float((average.module.head.weight - model.head.weight).detach().abs().max()) > 0.0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.case("torch-compile")
def test_compiled_it_learns_as_the_original(task: str) -> None:
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        model = torch.compile(started(task, 0, ours, None))
        found.append(losses(model, TASKS[task][1](0, DEVICE), 20, DEVICE))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-2, atol=1e-2)
