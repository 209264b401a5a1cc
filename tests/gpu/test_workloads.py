"""The four workloads at full size: one call, equal to 1e-4 in train and eval, not slower than eager, every way of
carrying weights over."""

from __future__ import annotations

import warnings

import pytest
import torch
from benchmark import close
from device_time import interleaved
from torch import nn
from workloads import Workload, randomised, workloads

import normswap
from normswap import modules

WORKLOADS = {w.name: w for w in workloads()}
SITES = {"linear_scale_batch_norm": ["batch_norm", "region"]}
"""In training; of the others the norm alone."""
by_name = pytest.mark.parametrize("name", WORKLOADS)


def optimized(model: nn.Module, x: torch.Tensor | None = None, **options: object) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        return normswap.optimize(model, x, min_speedup=None, **options)


def equal(model: nn.Module, swapped: nn.Module, x: torch.Tensor) -> None:
    """Same outputs and same buffers afterwards, in train and in eval."""
    for training in (True, False):
        model.train(training)
        swapped.train(training)
        with torch.no_grad():
            assert close(swapped(x), model(x)), training
    for (key, mine), theirs in zip(swapped.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=key)


def made(workload: Workload, seed: int = 0) -> nn.Module:
    return randomised(workload.make(), seed).cuda()


@by_name
def test_one_call_equal_and_faster(name: str) -> None:
    workload = WORKLOADS[name]
    model, x = made(workload), torch.randn(workload.shape, device="cuda")
    keys = {k: v.clone() for k, v in model.state_dict().items()}
    swapped = optimized(model, x, validate="forward")
    report = normswap.report(swapped)
    found = sorted((row["kind"], row["status"]) for row in report.rows)
    assert found == [(kind, "proved") for kind in SITES.get(name, [name])], str(report)
    assert report.model is not None and report.model["passed"]
    for (key, mine), (other, theirs) in zip(swapped.state_dict().items(), keys.items(), strict=True):
        assert key == other and torch.equal(mine, theirs)
    equal(model, swapped, x)
    for training in (True, False):
        model.train(training)
        swapped.train(training)
        with torch.no_grad():
            times = interleaved({"eager": lambda: model(x), "ours": lambda: swapped(x)})
        assert times["ours"] <= times["eager"], (training, times)


def smaller(name: str) -> tuple[Workload, torch.Tensor]:
    workload = {w.name: w for w in workloads(shrink=16)}[name]
    return workload, torch.randn(workload.shape, device="cuda")


@by_name
def test_gradients_are_proved(name: str) -> None:
    workload, x = smaller(name)
    swapped = optimized(made(workload).train(), x.requires_grad_(), validate="grad")
    rows = normswap.report(swapped).rows
    assert sorted(row["kind"] for row in rows) == SITES.get(name, [name])
    assert all(row["status"] == "proved" and row["gradients"] for row in rows), rows


@by_name
def test_weights_copied_one_by_one(name: str) -> None:
    workload, x = smaller(name)
    old, new = made(workload, seed=1), optimized(made(workload, seed=2))
    with torch.no_grad():
        for key, value in old.named_parameters():
            new.get_parameter(key).copy_(value)
        for key, value in old.named_buffers():
            new.get_buffer(key).copy_(value)
    equal(old, new, x)


@by_name
def test_copy_weights(name: str) -> None:
    workload, x = smaller(name)
    old, new = made(workload, seed=1), optimized(made(workload, seed=2))
    normswap.copy_weights(old, new)
    equal(old, new, x)


FRESH = {
    "l1_norm": lambda: modules.L1Norm(1),
    "layer_norm": lambda: modules.LayerNorm((64, 256, 256)),
    "group_norm": lambda: modules.GroupNorm(8, 64),
    "linear_scale_batch_norm": lambda: modules.LinearScaleBatchNorm(4096, 4096),
}
INNER = {"layer_norm": "ln", "group_norm": "gn"}


@by_name
@pytest.mark.case("state-dict")
def test_a_fresh_module_loads_the_torch_module_s_state_dict(name: str) -> None:
    workload, x = smaller(name)
    old, new = made(workload, seed=1), FRESH[name]().cuda()
    source = old.get_submodule(INNER.get(name, ""))
    new.load_state_dict(source.state_dict())
    equal(source, new, x)


def test_a_fresh_rms_norm() -> None:
    old, new = randomised(nn.RMSNorm(4096, eps=1e-6)).cuda(), modules.RMSNorm(4096, eps=1e-6).cuda()
    new.load_state_dict(old.state_dict())
    equal(old, new, torch.randn(512, 4096, device="cuda"))
