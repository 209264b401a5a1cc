"""RMSNorm over the last dims."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.criterion import Rows
from normswap.forwards import registered
from normswap.forwards.norm import norm_forward
from normswap.forwards.rms_norm import outside_autocast
from normswap.kinds.norm import Norm, are_of, are_per_sample
from normswap.norms import RMSNorm
from normswap.ops.rms_norm import rms_norm_directly
from normswap.ops.rows import Options


def arguments(norm: Any, x: Tensor) -> tuple[Any, ...]:
    return norm.normalized_shape, registered(norm, "_parameters", "weight"), norm.eps


def fused(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    """Of one that is written by hand, ``given`` says too what is added to the weight, and whether a cast stands before
    it."""
    by_hand = len(given) == 5
    shape, weight, eps, offset, rounds = given if by_hand else (*given, 0.0, False)
    options = Options(before, scale, shift, activation)
    plain = before is None and scale is None and activation is NONE
    if not plain and (scale is None or are_of(x.dtype, scale, shift)):
        out = rms_norm_directly(x, shape, weight, eps, offset, rounds, options)
        if out is not None:
            return out
    if scale is not None and not are_per_sample(x, scale, shift):
        return None
    order = {"weight_offset": offset, "cast_before_weight": rounds}
    with outside_autocast(x.device.type) if by_hand else contextlib.nullcontext():
        return ops.rms_norm(x, shape, weight, eps, **order, **options.keywords())


NORM = Norm(
    "rms_norm",
    (nn.RMSNorm,),
    F.rms_norm,
    ("normalized_shape", "weight=None", "eps=None"),
    arguments,
    fused,
    lambda norm, x: Rows(norm, x, centred=False).magnitudes(),
    (RMSNorm,),
    norm_forward("rms_norm", arguments),
    reads=("normalized_shape", "weight", "eps"),
    rows=True,
    # The statistic stands in it to the third power, each with its own error, and in rows of 2 or 3 elements nothing
    # averages out: at 4 PyTorch's own come to 1.4.
    c_gradient=8.0,
)
