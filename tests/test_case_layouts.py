"""Inputs and gradients of every layout: the same values and strides as PyTorch, and neither is written to."""

from __future__ import annotations

import pytest
import torch
from norm_models import (
    NORMS,
    assert_alike,
    assert_swaps_alike,
    by_kind,
    cotangent_of,
    made,
    results,
    swapped_copy,
)
from norm_tables import LAYOUTS

from normswap import ops


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.case("strided-input", "misaligned", "output-strides", "never-writes-input")
def test_inputs_of_every_layout(kind: str, layout: str) -> None:
    model, x = made(kind)
    assert_swaps_alike(model, LAYOUTS[layout](x))


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("strided-gradient", "never-writes-input")
def test_gradients_of_every_layout(kind: str, layout: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    assert_alike(model, swapped, x, LAYOUTS[layout](cotangent_of(model, x)))


@by_kind
@pytest.mark.case("strided-gradient")
def test_the_gradient_of_a_sum_is_expanded(kind: str) -> None:
    model, x = made(kind)
    model.train()
    swapped = swapped_copy(model, x)
    assert_alike(model, swapped, x, torch.ones(()).expand(cotangent_of(model, x).shape))


@pytest.mark.case("channels-last", "output-strides")
@pytest.mark.parametrize("shape", ((4, 6, 5, 3), (2, 6, 3, 4, 2)))
def test_channels_last_in_and_out_with_either_gradient(shape: tuple[int, ...]) -> None:
    model, _ = made("group_norm")
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape).to(memory_format=layout)
    swapped, cotangent = swapped_copy(model, x), torch.randn(shape)
    for gradient in (cotangent, cotangent.to(memory_format=layout)):
        assert_alike(model, swapped, x, gradient)
    assert results(swapped, x)["output"].is_contiguous(memory_format=layout)
    assert_swaps_alike(model, x[:, :, ::2])


@pytest.mark.case("strided-input")
def test_weights_of_every_layout() -> None:
    """Weights that are views, as of a model whose parameters share one storage."""
    for kind in ("layer_norm", "rms_norm", "group_norm"):
        model, x = made(kind)
        for name, parameter in model.named_parameters():
            parameter.data = torch.randn(3 * parameter.numel())[1::3].view(parameter.shape)
            assert parameter.stride() == (3,), name
        assert_swaps_alike(model, x)


@pytest.mark.case("never-writes-input")
@pytest.mark.parametrize("training", (True, False))
def test_ops_leave_every_argument_as_it_was(training: bool) -> None:
    x, w, b = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    calls = (
        (ops.layer_norm, (x, (12,), w, b)),
        (ops.rms_norm, (x, (12,), w)),
        (ops.group_norm, (x, 3, w, b)),
        (ops.l1_norm, (x,)),
        (ops.scale_batch_norm, (x, w, None if training else b, None if training else w.abs(), w, b, training)),
        (ops.fold_scale_batch_norm, (torch.randn(12, 7), b, w, b, w.abs(), w, b, 1e-5)),
    )
    for op, arguments in calls:
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        op(*arguments)
        assert all(torch.equal(a, o) for a, o in zip(arguments, before, strict=True) if isinstance(a, torch.Tensor))


def test_every_layout_is_one() -> None:
    for norm in NORMS.values():
        x = torch.randn(norm.shape)
        strides = {name: layout(x).stride() for name, layout in LAYOUTS.items()}
        assert len(set(strides.values())) == len(LAYOUTS) - 1, strides  # misaligned has the strides of contiguous
        assert LAYOUTS["misaligned"](x).data_ptr() % 16 != 0
