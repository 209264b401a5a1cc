"""Batch normalisation by running statistics, with what stands behind it."""

from __future__ import annotations

from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import DTYPES, direct


def batch_norm_eval(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the batch normalisation of ``input`` (N, C, *) by running statistics
    (Ioffe & Szegedy 2015), as ``torch.nn.functional.batch_norm`` in eval: norm and sum are rounded to their dtype.

    The statistics, ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. The output is contiguous or
    channels_last, as the input. Our kernel takes up to 4096 channels and records no gradient. Raises what PyTorch's ops
    raise.
    """
    op = direct("batch_norm_eval", input, running_mean, running_var, weight, bias, residual)
    if op is not None and input.dtype in DTYPES:
        numbers = (activation.code, activation.low, activation.high)
        out = op(input, running_mean, running_var, weight, bias, eps, residual, *numbers)
        if out is not None:
            return out
    return reference.batch_norm_eval(input, running_mean, running_var, weight, bias, eps, activation, residual=residual)
