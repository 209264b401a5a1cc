"""Linear -> scale -> BatchNorm in training on the GPU, where the Linear's bias goes past the product."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from linear_bias import (
    CHANNELS,
    FEATURES,
    Parts,
    by_bias,
    by_options,
    by_scale,
    check_not_finite,
    check_rounding,
    check_training,
)


@by_bias
@by_scale
@by_options
@pytest.mark.parametrize("precision", ("highest", "high"))
@pytest.mark.case("bn-momentum", "bn-no-running-stats", "bn-affine-false", "offset-mean")
def test_training_behind_a_linear_with_a_bias(
    bias: float | None, scale_shape: tuple[int, ...] | None, options: dict[str, Any], precision: str
) -> None:
    parts = Parts(bias, scale_shape, **options).cuda()
    check_training(parts, precision)
    check_rounding(parts, precision)


@by_scale
def test_a_bias_that_is_not_finite_spoils_its_column(scale_shape: tuple[int, ...] | None) -> None:
    check_not_finite(Parts(1.0, scale_shape).cuda())


@pytest.mark.case("double-backward")
def test_gradients_of_gradients_behind_a_linear_with_a_bias() -> None:
    parts = Parts(10.0, (CHANNELS,)).cuda()
    generator = torch.Generator("cuda").manual_seed(57)
    exact, x = copy.deepcopy(parts).double(), torch.randn(9, FEATURES, generator=generator, device="cuda")
    found = []
    for model, function, given in ((parts, parts.fused, x.clone()), (exact, exact, x.double())):
        given.requires_grad_()
        (first,) = torch.autograd.grad(function(given).pow(3).sum(), given, create_graph=True)
        leaves = {"input": given, **dict(model.named_parameters())}
        twice = torch.autograd.grad(first.square().sum(), list(leaves.values()))
        found.append({"first": first.detach(), **dict(zip(leaves, twice, strict=True))})
    ours, theirs = found
    for name, mine in ours.items():
        beside = theirs["gemm.weight" if name == "gemm.bias" else name]  # the bias's is 0 but for rounding
        torch.testing.assert_close(mine.double(), theirs[name], rtol=1e-3, atol=1e-3 * float(beside.abs().max()))
