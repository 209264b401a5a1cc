"""Swapped models in DataParallel, DDP and FSDP2 on one GPU, and what hangs on a norm while our kernels run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Every, randomised
from norm_models import (
    assert_alike,
    assert_close,
    by_kind,
    cotangent_of,
    drawn,
    made,
    results,
    swapped_copy,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import normswap
from normswap import modules
from normswap.plans import Reason

DEVICE = "cuda"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this one process."""
    backend = {"cuda": "nccl", "cpu": "gloo"}[DEVICE]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model with a norm of every kind, it swapped, and an input."""
    model = randomised(Every()).train().to(DEVICE)
    model.drop.p = 0.0
    x = drawn((8, 6, 5), DEVICE)
    return model, swapped_copy(model, x), x


@pytest.mark.case("data-parallel")
def test_data_parallel() -> None:
    model, swapped, x = pair()
    assert_alike(DataParallel(model), DataParallel(swapped), x, cotangent_of(model, x))


@pytest.mark.case("data-parallel")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_on_two_gpus() -> None:
    model, swapped, x = pair()
    model.eval(), swapped.eval()
    assert_alike(DataParallel(model, [0, 1]), DataParallel(swapped, [0, 1]), x, cotangent_of(model, x))


@pytest.mark.case("data-parallel")
@pytest.mark.usefixtures("group")
def test_distributed_data_parallel() -> None:
    model, swapped, x = pair()
    cotangent = cotangent_of(model, x)
    wrapped = [DistributedDataParallel(one) for one in (model, swapped)]
    for _ in range(2):
        assert_alike(*wrapped, x, cotangent)
    inside = swapped_copy(wrapped[0], x, inplace=True).module
    assert modules.site_match(inside.layer) is not None
    assert_alike(inside, swapped, x, cotangent)


@pytest.mark.case("data-parallel")
@pytest.mark.usefixtures("group")
def test_fully_shard_after_the_swap() -> None:
    model, swapped, x = pair()
    cotangent, mesh = cotangent_of(model, x), dist.init_device_mesh(DEVICE, (1,))
    for one in (model, swapped):
        for child in (one.layer, one.projection, one):
            fully_shard(child, mesh=mesh)
    theirs, ours = results(model, x, cotangent), results(swapped, x, cotangent)
    for name, expected in theirs.items():
        ours_full, full = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (ours[name], expected))
        assert_close(ours_full, full, name)


@pytest.mark.case("data-parallel")
@pytest.mark.usefixtures("group")
def test_a_norm_already_sharded_is_refused_and_left_whole() -> None:
    model, x = made("layer_norm", DEVICE)
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=dist.init_device_mesh(DEVICE, (1,)))
    cotangent = cotangent_of(model, x)
    assert [one.refusal.reason for one in normswap.plan(sharded).refused] == [Reason.SHARDED]
    left = normswap.optimize(sharded, inplace=True, validate="off", on_empty="ignore")
    assert left is sharded and modules.site_match(left) is None and isinstance(left, FSDPModule)
    theirs = results(model, x, cotangent)
    for name, ours in results(left, x, cotangent).items():
        assert_close(ours.full_tensor() if hasattr(ours, "full_tensor") else ours, theirs[name], name)


@by_kind
@pytest.mark.case("hooks", "later-hooks")
def test_hooks_fire_and_change_what_they_changed(kind: str) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model, x)
    seen: list[list[str]] = []
    for one in (model, swapped):
        fired: list[str] = []
        one.register_forward_pre_hook(lambda _, args, fired=fired: fired.append("pre") or (args[0] + 1,))
        one.register_forward_hook(lambda _, args, out, fired=fired: fired.append("forward") or out * 2)
        one.register_full_backward_pre_hook(lambda _, grad, fired=fired: fired.append("backward pre"))
        one.register_full_backward_hook(lambda _, gi, go, fired=fired: fired.append("backward"))
        seen.append(fired)
    assert_alike(model, swapped, x, cotangent_of(made(kind, DEVICE)[0], x))
    assert seen[0] == seen[1] == ["pre", "forward", "backward pre", "backward"]


@by_kind
@pytest.mark.case("optimizer-before-swap")
def test_an_optimizer_made_before_the_swap_trains_it(kind: str) -> None:
    (model, x), (twin, _) = made(kind, DEVICE), made(kind, DEVICE)
    width = x.shape[-1]
    model, twin = (nn.Sequential(nn.Linear(width, width), one).to(DEVICE).train() for one in (model, twin))
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, twin)]
    assert swapped_copy(model, x, inplace=True) is model
    cotangent = cotangent_of(twin, x)
    for _ in range(3):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (one(x) * cotangent).mean().backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert_close(ours, theirs, name)
