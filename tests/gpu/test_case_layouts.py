"""Inputs and gradients of every layout on the GPU: PyTorch's values and strides, and neither is written to."""

from __future__ import annotations

import pytest
import torch
from norm_models import (
    DTYPES,
    assert_alike,
    assert_same_results,
    assert_swaps_alike,
    by_kind,
    cotangent_of,
    drawn,
    made,
    results,
    swapped_copy,
)
from norm_tables import LAYOUTS

DEVICE = "cuda"
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


@by_kind
@by_dtype
@by_layout
@pytest.mark.case("strided-input", "misaligned", "output-strides", "never-writes-input")
def test_inputs_of_every_layout(kind: str, layout: str, dtype: torch.dtype) -> None:
    model, x = made(kind, DEVICE, dtype)
    view = LAYOUTS[layout](x)
    if kind == "l1_norm" and layout == "transposed":  # its output is transposed too: PyTorch computes it
        swapped = swapped_copy(model, x)
        assert_alike(model, swapped, view, cotangent_of(model, view))
    else:
        assert_swaps_alike(model, view)


@by_kind
@by_dtype
@by_layout
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("strided-gradient", "never-writes-input")
def test_gradients_of_every_layout(kind: str, layout: str, dtype: torch.dtype, training: bool) -> None:
    model, x = made(kind, DEVICE, dtype)
    swapped = swapped_copy(model.train(training), x)
    cotangent = LAYOUTS[layout](cotangent_of(model, x))
    state = {name: value.clone() for name, value in swapped.state_dict().items()}
    dense = results(swapped, x, cotangent.contiguous())
    swapped.load_state_dict(state)
    assert_same_results(results(swapped, x, cotangent), dense, model)
    swapped.load_state_dict(state)
    assert_alike(model, swapped, x, cotangent)


@by_kind
@pytest.mark.case("strided-gradient")
def test_the_gradient_of_a_sum_is_expanded(kind: str) -> None:
    model, x = made(kind, DEVICE)
    model.train()
    swapped = swapped_copy(model, x)
    assert_alike(model, swapped, x, torch.ones((), device=DEVICE).expand(cotangent_of(model, x).shape))


@by_dtype
@pytest.mark.case("channels-last", "output-strides")
@pytest.mark.parametrize("shape", ((4, 6, 5, 3), (2, 6, 3, 4, 2)))
def test_channels_last_in_and_out_with_either_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """PyTorch's own CUDA op gives a contiguous output; ours stays channels_last, as PyTorch's does on the CPU."""
    model, _ = made("group_norm", DEVICE, dtype)
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = drawn(shape, DEVICE, dtype).to(memory_format=layout)
    swapped, cotangent = swapped_copy(model, x), drawn(shape, DEVICE, dtype)
    for gradient in (cotangent, cotangent.to(memory_format=layout)):
        assert_alike(model, swapped, x, gradient, strides=False)
    assert results(swapped, x)["output"].is_contiguous(memory_format=layout)
    assert_swaps_alike(model, x[:, :, ::2], strides=False)


@pytest.mark.case("strided-input")
def test_weights_of_every_layout() -> None:
    """Weights that are views, as of a model whose parameters share one storage."""
    for kind in ("layer_norm", "rms_norm", "group_norm"):
        model, x = made(kind, DEVICE)
        for parameter in model.parameters():
            parameter.data = drawn((3 * parameter.numel(),), DEVICE)[1::3].view(parameter.shape)
        assert_swaps_alike(model, x)
