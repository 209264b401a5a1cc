"""Instance normalisation by the statistics of the input: a group norm with as many groups as channels."""

from __future__ import annotations

import math

from torch import Tensor

from normswap import reference
from normswap.activation import NONE, Activation
from normswap.ops.dispatch import LARGE_GROUP, affine_dtypes_fit, direct, native_serves
from normswap.ops.group_norm import native_group_norm


def instance_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = NONE,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(norm(input) + residual)`` with the instance normalisation of ``input`` (N, C, *) (Ulyanov et al.
    2016), as ``torch.nn.functional.instance_norm`` without running statistics.

    ``weight`` and ``bias`` are (C,), ``residual`` has the input's shape. A channels_last input gives a channels_last
    output; any other a contiguous one. Returns the input's shape and dtype, also under autocast. Raises what PyTorch's
    ops raise.
    """
    shape = input.shape
    if len(shape) >= 3 and input.numel() > shape[0] * shape[1]:  # of one value a row PyTorch raises ValueError
        channels = shape[1]
        op = direct("group_norm", input, weight, bias, residual)
        if op is not None:
            numbers = activation.code, activation.low, activation.high
            out = op(input, channels, weight, bias, eps, *numbers, residual, False)
            if out is not None:
                return out
        if (
            native_serves(input, weight, bias, residual, elements=math.prod(shape[2:]), least=LARGE_GROUP)
            and (weight is None or weight.shape == (channels,))
            and (bias is None or bias.shape == (channels,))
            and (residual is None or (residual.shape == input.shape and residual.dtype == input.dtype))
            and affine_dtypes_fit(input, weight, bias)
        ):
            found = native_group_norm(input, weight, bias, channels, eps, activation, residual, input.dtype)
            if found is not None:
                return found
    return reference.instance_norm(input, weight, bias, eps, activation, residual=residual)
