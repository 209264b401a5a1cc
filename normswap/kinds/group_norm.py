"""GroupNorm over groups of channels."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import Activation
from normswap.criterion import Rows
from normswap.forwards import affine_of
from normswap.forwards.norm import norm_forward
from normswap.kinds.norm import Norm, is_alike
from normswap.norms import GroupNorm
from normswap.ops.dispatch import DTYPES, PLAIN, autocasts


def arguments(norm: Any, x: Tensor) -> tuple[Any, ...]:
    return (norm.num_groups, *affine_of(norm), norm.eps)


def fused(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    groups, weight, bias, eps = given
    if not (is_alike(x, behind) or adds_to_float32(x, behind)):
        return None
    return ops.group_norm(x, groups, weight, bias, eps, activation, residual=behind, dtype=dtype)


def adds_to_float32(x: Tensor, behind: Any) -> bool:
    """Whether the norm of ``x``, which autocast makes float32, is added to something of its shape and no wider."""
    return (
        autocasts(x)
        and type(behind) in PLAIN
        and behind.shape == x.shape
        and behind.device == x.device
        and {x.dtype, behind.dtype} <= {*DTYPES}
        and x.is_cuda
    )


def sample(norm: Any) -> tuple[int, ...]:
    channels = getattr(norm, "num_channels", None)  # of a class; a call has none
    if channels is None:
        channels = 3 * norm.num_groups if norm.weight is None else norm.weight.numel()
    return (2, channels, 6, 5)


NORM = Norm(
    "group_norm",
    (nn.GroupNorm,),
    F.group_norm,
    ("num_groups", "weight=None", "bias=None", "eps=1e-5"),
    arguments,
    fused,
    lambda norm, x: Rows(norm, x, groups=norm.num_groups).magnitudes(),
    (GroupNorm,),
    norm_forward("group_norm", arguments),
    reads=("num_groups", "num_channels", "weight", "bias", "eps"),
    widens=True,
    sample=sample,
)
