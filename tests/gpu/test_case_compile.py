"""torch.compile in one graph, torch.export and fakes of a swapped norm on the GPU."""

from __future__ import annotations

import pytest
import torch
from norm_models import (
    assert_close,
    by_kind,
    calls_of,
    drawn,
    fake_call,
    made,
    swapped_copy,
)
from norm_tables import LAYOUTS
from row_checks import NO_OPTIONS
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.usefixtures("fresh_caches")
DEVICE = "cuda"


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("torch-compile")
def test_one_graph_for_every_rank_and_size(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
    for x in calls_of(kind, DEVICE):
        output, expected = compiled(x.requires_grad_()), model(x)
        assert_close(output, expected)
        assert output.stride() == expected.stride()
        cotangent = torch.randn_like(expected)
        ours, theirs = (torch.autograd.grad(y, x, cotangent)[0] for y in (output, expected))
        assert_close(ours, theirs, "gradient")
        with torch.no_grad():
            assert_close(compiled(x), model(x))
    for (name, ours), theirs in zip(swapped.named_buffers(), model.buffers(), strict=True):
        assert_close(ours, theirs, name)


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.case("torch-compile", "fake-strides")
def test_a_compiled_norm_keeps_the_strides_of_an_eager_one(kind: str, layout: str) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model, x)
    view = LAYOUTS[layout](x)
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        ours, eager = compiled(view), swapped(view)
    assert ours.stride() == eager.stride()
    assert_close(ours, eager)


@by_kind
@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.case("torch-export")
def test_export(kind: str, strict: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model, x)
    batch = {0: torch.export.Dim("batch", min=2, max=1000)}
    exported = torch.export.export(swapped, (x,), dynamic_shapes=(batch,), strict=strict)
    again = torch.cat([x, x + 1])
    assert_close(exported.module()(again), model(again))


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("fake-strides", "no-kernel-in-fake")
def test_fakes_have_the_strides_of_real_outputs_and_run_nothing(kind: str, layout: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    view = LAYOUTS[layout](x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        fake = fake_call(swapped, view)
        torch.cuda.synchronize()
    assert not [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    real = swapped(view)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


@pytest.mark.case("no-kernel-in-fake")
def test_our_ops_run_nothing_in_a_fake() -> None:
    """What torch.compile does with them: each only fills tensors it is given."""
    x, w = drawn((5, 12), DEVICE), drawn((12,), DEVICE)
    out = torch.full_like(x, float("nan"))
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake, weight, filled = (mode.from_tensor(t) for t in (x, w, out))
        torch.ops.normswap.layer_norm(fake, 1, weight, weight, 1e-5, *NO_OPTIONS, filled, None, None, None, 0)
        torch.ops.normswap.rms_norm(fake, 1, weight, 1e-5, 1.0, True, *NO_OPTIONS, filled, None, None, 0)
        torch.ops.normswap.l1_norm(fake, 12, 0.0, 0.0, filled, None, 0)
    assert out.isnan().all()
