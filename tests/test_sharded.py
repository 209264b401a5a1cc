"""fully_shard before and after the swap: FSDP gives a module another class, and its parameters another type."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import randomised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import normswap
from normswap.installed import is_installed
from normswap.plans import NormswapError, Reason

pytestmark = pytest.mark.filterwarnings("ignore")


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("gloo")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6))
    return randomised(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), block, ByHand())).eval()


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for part in (model[1], model[2], model[3], model):
        fully_shard(part, mesh=mesh)
    return model


SITES = ("1", "2.1", "3")
X = torch.linspace(-2, 3, 32).reshape(4, 8)


@pytest.mark.parametrize("inputs", [X, None])
def test_what_is_sharded_already_is_refused_and_left_whole(inputs: Tensor | None) -> None:
    model = made()
    expected = model(X)
    sharded(model)
    classes = [type(module) for module in model.modules()]
    assert normswap.optimize(model, inputs, inplace=True) is model
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(X), expected)
    refused = normswap.report(model).rows
    assert [row["name"] for row in refused] == [*SITES] and {row["code"] for row in refused} == {Reason.SHARDED.name}
    assert "optimize() before fully_shard" in refused[0]["cure"]


def test_a_copy_of_a_sharded_model_is_refused_with_the_cure() -> None:
    model = sharded(made())
    with pytest.raises(NormswapError, match="cannot be copied.*inplace=True"):
        normswap.optimize(model, X)
    model(X)


@pytest.fixture
def swapped() -> nn.Module:
    model = made()
    model.expected = model(X)
    normswap.optimize(model, X, inplace=True)
    sharded(model)
    assert isinstance(model[1], FSDPModule) and isinstance(model[3], FSDPModule)
    sys.modules["normswap.pipeline"]._reports.pop(model)  # what is told is read from the model
    return model


def assert_originals(model: nn.Module) -> None:
    for name, original in zip(SITES, (nn.LayerNorm, nn.RMSNorm, ByHand), strict=True):
        site = model.get_submodule(name)
        assert isinstance(site, original) and not is_installed(type(site))
        assert isinstance(site, FSDPModule) == (name != "2.1")


def test_report_and_validate_after_sharding(swapped: nn.Module) -> None:
    assert normswap.report(swapped).swapped == SITES
    assert normswap.plan(swapped).swaps == normswap.plan(swapped).refused == ()
    classes = [type(module) for module in swapped.modules()]
    report = normswap.validate(swapped, X)
    assert report.swapped == SITES and {row["status"] for row in report.rows} == {"wiring"}
    assert {row["inputs"] for row in report.rows} == {"captured"} and report.model["passed"]
    assert [type(module) for module in swapped.modules()] == classes
    assert torch.equal(swapped(X), swapped.expected)


def test_without_inputs_what_is_sharded_is_not_checked(swapped: nn.Module) -> None:
    report = normswap.validate(swapped)
    assert {row["status"] for row in report.rows} == {"unchecked"}
    assert all("sharded" in row["detail"] for row in report.rows)


def test_without_inputs_a_region_of_what_is_sharded_is_not_checked() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).eval()
    normswap.optimize(model, X, inplace=True, min_speedup=None)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    (row,) = normswap.validate(model).rows
    assert (row["kind"], row["status"]) == ("region", "unchecked") and "sharded" in row["detail"]


def test_disabled_and_revert_after_sharding(swapped: nn.Module) -> None:
    classes = [type(module) for module in swapped.modules()]
    with normswap.disabled(swapped):
        assert_originals(swapped)
        assert torch.equal(swapped(X), swapped.expected)
    assert [type(module) for module in swapped.modules()] == classes
    normswap.revert(swapped)
    assert_originals(swapped)
    assert normswap.report(swapped).swapped == ()
    swapped(X).sum().backward()
    assert all(parameter.grad is not None for parameter in swapped.parameters())
