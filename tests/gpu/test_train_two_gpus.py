"""A swapped model in DistributedDataParallel and fully_shard on two GPUs learns as the original does there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from training import TASKS, losses, made, swapped

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
STEPS = 40
LOW = torch.bfloat16


def _ddp(model: nn.Module, rank: int) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[rank])


def _sharded(model: nn.Module, rank: int, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    mesh, options = init_device_mesh("cuda", (2,)), {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _sharded_in_bfloat16(model: nn.Module, rank: int) -> nn.Module:
    return _sharded(model, rank, MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32))


WRAPS: dict[str, tuple[Callable[[nn.Module, int], nn.Module], torch.dtype | None]] = {
    "ddp": (_ddp, None),
    "ddp under autocast": (_ddp, LOW),
    "fully_shard": (_sharded, None),
    "fully_shard in bfloat16": (_sharded_in_bfloat16, None),
}


def _train(rank: int, task: str, name: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrap, autocast = WRAPS[name]
    found: dict[str, object] = {}
    for ours in (False, True):
        model, batches = made(task, 0, "cuda"), TASKS[task][1](rank, "cuda")
        if ours:
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                model = swapped(model, next(TASKS[task][1](0, "cuda"))[0])
        wrapped = wrap(model, rank)
        found[str(ours)] = losses(wrapped, batches, STEPS, "cuda", autocast=autocast)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            losses(wrapped, batches, 1, "cuda", autocast=autocast)
        found[f"kernels {ours}"] = sum(event.name.startswith("normswap::") for event in profiled.events())
    state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found["parameters"] = [p.detach().cpu() for p in state]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.case("data-parallel")
def test_two_processes_learn_as_the_original(
    tmp_path: Path, task: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    mp.spawn(_train, (task, name, str(tmp_path)), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for found in (one, other):
        ours, theirs = torch.tensor(found["True"]), torch.tensor(found["False"])
        record_property("apart", float((ours - theirs).abs().max()))
        loose = WRAPS[name][1] is not None or "bfloat16" in name
        torch.testing.assert_close(ours, theirs, rtol=5e-2 if loose else 1e-2, atol=5e-2 if loose else 1e-2)
        assert found["kernels True"] and not found["kernels False"]
        assert float(ours[-10:].mean()) < float(ours[:3].mean())
    for mine, others in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(mine, others)
