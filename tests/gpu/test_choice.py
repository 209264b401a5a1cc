"""The choice on a real GPU: costs of device and host apart, models bound by either, equal plans, what it costs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.timing import clock
from normswap.timing.clock import clock_of

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def stack(width: int, layers: int, dtype: torch.dtype = torch.float16) -> nn.Module:
    found: list[nn.Module] = []
    for _ in range(layers):
        found += [nn.LayerNorm(width), nn.Linear(width, width)]
    return nn.Sequential(*found).to(DEVICE, dtype).eval()


def test_a_wait_lasts_as_long_as_asked() -> None:
    machine = clock_of(DEVICE)
    machine.hold(100.0)
    start = machine.mark()
    machine.hold(1000.0)
    assert machine.between_us(start, machine.mark()) == pytest.approx(1000.0, rel=0.3)


def test_device_and_host_are_told_apart() -> None:
    """A small kernel costs the device a few microseconds and the host more; a large one the reverse."""
    machine = clock_of(DEVICE)
    small, large = torch.zeros(64, device=DEVICE), torch.zeros(2**28, device=DEVICE)
    first, second = clock.costs(machine, [lambda: small.add_(1), lambda: large.add_(1)])
    assert 0.5 < first.device_us < 5.0 and second.device_us > 300.0
    assert first.host_us < 100.0 and second.host_us < 100.0


def kept(model: nn.Module, x: Tensor, **options: float) -> normswap.Report:
    with torch.no_grad():
        return normswap.report(normswap.optimize(model, x, **options))


def test_a_model_bound_by_its_device_keeps_what_is_faster_there() -> None:
    rows = torch.randn(65536, 1024, device=DEVICE, dtype=torch.float16)  # of 16384 a slow host takes as long
    report = kept(stack(1024, 4), rows)
    assert report.times is not None and report.times["bound"] == "device" and len(report.swapped) == 4
    assert report.times["after_ms"] <= 1.02 * report.times["before_ms"]
    assert all(row["eager_device_us"] > row["ours_device_us"] for row in report.rows)


def test_a_model_bound_by_its_host_is_known_as_such() -> None:
    report = kept(stack(64, 8), torch.randn(8, 64, device=DEVICE, dtype=torch.float16))
    assert report.times is not None and report.times["bound"] == "host"
    assert report.times["after_ms"] <= 1.1 * report.times["before_ms"]


@pytest.mark.parametrize("rows", [8, 16384])
def test_equal_runs_give_equal_plans(rows: int, record_property: Callable[[str, object], None]) -> None:
    model, x = stack(1024, 4), torch.randn(rows, 1024, device=DEVICE, dtype=torch.float16)
    plans = [kept(model, x).plan.to_json() for _ in range(10)]
    most = max(plans.count(plan) for plan in plans)
    record_property("equal_of_ten", most)
    assert most >= 9


def test_a_training_step_is_timed_with_its_backward_and_leaves_no_gradient() -> None:
    model = stack(1024, 2, torch.float32).train()
    x = torch.randn(4096, 1024, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        swapped = normswap.optimize(model, x, inplace=True, on_empty="ignore")
    report = normswap.report(swapped)
    assert report.times is not None and report.times["training"]
    assert report.times["device_ms"] > 2 * sum(row["eager_device_us"] for row in report.rows) / 1000
    assert all(p.grad is None for p in model.parameters())


def test_the_choice_takes_little_time(record_property: Callable[[str, object], None]) -> None:
    """Beyond the proof."""
    model, x = stack(1024, 12), torch.randn(16384, 1024, device=DEVICE, dtype=torch.float16)
    kept(stack(64, 1), x[:8, :64])
    seconds = {}
    for name, options in (("proof", {"min_speedup": None}), ("both", {})):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept(model, x, **options)
        seconds[name] = time.perf_counter() - start
        record_property(f"{name}_s", round(seconds[name], 2))
    assert seconds["both"] - seconds["proof"] < 1.5


# --- torch.compile --------------------------------------------------------------------------------------------------


def kernels_of(function: Callable[[Tensor], Tensor], x: Tensor) -> set[str]:
    """Names of the GPU's kernels in a call of the compiled function."""
    compiled = torch.compile(function, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            compiled(x)
            torch.cuda.synchronize()
    return {event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA}


@pytest.mark.case("torch-compile")
@pytest.mark.parametrize(("width", "ours"), [(1024, False), (131072, True)])
def test_compiled_ours_runs_where_rows_are_long(width: int, ours: bool) -> None:
    torch._dynamo.reset()
    norm = modules.LayerNorm(width).to(DEVICE, torch.bfloat16).eval().requires_grad_(False)
    x = torch.randn(64, width, device=DEVICE, dtype=torch.bfloat16)
    names = kernels_of(lambda x: torch.relu(norm(x)), x)
    assert any("normswap" in name for name in names) == ours
    assert ours or len(names) == 1  # norm and activation fused
    with torch.no_grad():
        expected = torch.relu(nn.functional.layer_norm(x, (width,), norm.weight, norm.bias))
        torch.testing.assert_close(torch.compile(lambda x: torch.relu(norm(x)))(x), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.case("torch-compile")
def test_compiled_with_gradients_the_formula_stands_in_the_graph() -> None:
    torch._dynamo.reset()
    norm, x = modules.RMSNorm(131072).to(DEVICE), torch.randn(8, 131072, device=DEVICE, requires_grad=True)
    compiled = torch.compile(norm, fullgraph=True)
    ours = torch.autograd.grad(compiled(x).square().sum(), [x, norm.weight])
    theirs = torch.autograd.grad(nn.functional.rms_norm(x, (131072,), norm.weight).square().sum(), [x, norm.weight])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
