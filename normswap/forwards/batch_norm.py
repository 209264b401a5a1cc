"""What nn.BatchNorm1d, 2d and 3d compute, with what stands behind it: everything is read anew on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.forwards import affine_of, only_argument, registered
from normswap.forwards.replaced import Replaced, at_once_as
from normswap.ops.at_once import NAMES

RANKS: Mapping[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
"""The classes, and how many dims their inputs have."""


def ranks_of(norm: nn.Module) -> tuple[int, ...]:
    """How many dims the input of ``norm`` may have; none where it is no BatchNorm of torch.nn."""
    for cls, ranks in RANKS.items():
        if isinstance(norm, cls):
            return ranks
    return ()


def batch_norm(norm: Any, x: Tensor, activation: Activation = NONE, residual: Tensor | None = None) -> Tensor:
    """``activation(norm(x) + residual)`` for a BatchNorm and an input of a rank that it takes."""
    affine, eps = affine_of(norm), norm.eps
    mean, var = registered(norm, "_buffers", "running_mean"), registered(norm, "_buffers", "running_var")
    if not norm.training and (mean is not None or var is not None):
        return ops.batch_norm_eval(x, mean, var, *affine, eps, activation, residual=residual)
    mean, var, momentum, batches = updated_by(norm)
    return ops.batch_norm(
        x, mean, var, *affine, True, momentum, eps, activation, residual=residual, num_batches_tracked=batches
    )


def updated_by(norm: Any) -> tuple[Tensor | None, Tensor | None, float, Tensor | None]:
    """What a call by the statistics of the batch updates, and how: running mean and variance, momentum and counter."""
    mean = var = batches = None
    momentum = norm.momentum
    if norm.training and norm.track_running_stats:
        mean, var = registered(norm, "_buffers", "running_mean"), registered(norm, "_buffers", "running_var")
        batches = registered(norm, "_buffers", "num_batches_tracked")
    if momentum is None:  # the average of all batches
        momentum = 0.0
        if batches is not None:
            batches.add_(1)
            momentum, batches = 1.0 / float(batches), None
    return mean, var, momentum, batches


def make_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """The forward of the swapped class; what is no input for it is left to the original."""
    ranks, argument = RANKS[replaced.original], replaced.argument
    at_once = at_once_as(replaced, "batch_norm", (ranks,), *NAMES["batch_norm"])

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else only_argument(args, kwargs, argument)
        if not torch.compiler.is_compiling() and (out := at_once.call(self, x)) is not None:
            return out
        if isinstance(x, Tensor) and x.dim() in ranks and replaced.is_on(self):
            return batch_norm(self, x)
        return replaced.run(self, *args, **kwargs)

    return forward
