"""torch.compile in one graph, torch.export and fakes of a swapped norm."""

from __future__ import annotations

import pytest
import torch
from norm_models import (
    assert_alike,
    assert_close,
    by_kind,
    calls_of,
    cotangent_of,
    fake_call,
    made,
    swapped_copy,
)
from norm_tables import LAYOUTS

pytestmark = pytest.mark.usefixtures("fresh_caches")


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("torch-compile")
def test_one_graph_for_every_rank_and_size(kind: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True, dynamic=True)
    for x in calls_of(kind):
        output, expected = compiled(x.requires_grad_()), model(x)
        assert_close(output, expected)
        assert output.stride() == expected.stride()
        if output.requires_grad:
            cotangent = torch.randn_like(expected)
            ours, theirs = (torch.autograd.grad(y, x, cotangent)[0] for y in (output, expected))
            assert_close(ours, theirs, "gradient")
        with torch.no_grad():
            assert_close(compiled(x), model(x))
    for (name, ours), theirs in zip(swapped.named_buffers(), model.buffers(), strict=True):
        assert_close(ours, theirs, name)


@by_kind
@pytest.mark.case("torch-compile")
def test_swapping_and_reverting_after_a_compile(kind: str) -> None:
    """A compiled model goes on to be right when its norms are swapped in place, and when they are put back."""
    model, x = made(kind)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), expected)
    swapped_copy(model, x, inplace=True)
    assert_close(compiled(x), expected)
    assert_alike(model, model, x, cotangent_of(model, x))


@by_kind
@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.case("torch-export")
def test_export(kind: str, strict: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x)
    batch = {0: torch.export.Dim("batch", min=2, max=1000)}
    exported = torch.export.export(swapped, (x,), dynamic_shapes=(batch,), strict=strict)
    again = torch.cat([x, x + 1])
    assert_close(exported.module()(again), model(again))
    assert list(exported.state_dict) == [k for k in model.state_dict() if k in exported.state_dict]


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("fake-strides", "no-kernel-in-fake")
def test_fakes_have_the_strides_of_real_outputs(kind: str, layout: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    view = LAYOUTS[layout](x)
    before = [tensor.clone() for tensor in swapped.state_dict().values()]
    fake = fake_call(swapped, view)
    assert all(torch.equal(a, b) for a, b in zip(before, swapped.state_dict().values(), strict=True))
    real = swapped(view)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)
