"""LayerNorm over the last dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.criterion import Rows
from normswap.forwards import affine_of
from normswap.forwards.norm import norm_forward
from normswap.kinds.norm import Norm, are_of, are_per_sample
from normswap.norms import LayerNorm
from normswap.ops.dispatch import autograd_only
from normswap.ops.layer_norm import layer_norm_directly
from normswap.ops.rows import Options


def arguments(norm: Any, x: Tensor) -> tuple[Any, ...]:
    return (norm.normalized_shape, *affine_of(norm), norm.eps)


def fused(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    shape, weight, bias, eps = given
    if before is None and scale is None and activation is NONE:
        return ops.layer_norm(x, shape, weight, bias, eps, dtype=dtype)
    options = Options(before, scale, shift, activation)
    if dtype is None and (scale is None or are_of(x.dtype, scale, shift)):
        wide = torch.float32 if torch.is_autocast_enabled("cuda") else None
        out = layer_norm_directly(x, shape, weight, bias, eps, options, wide)
        if out is not None:
            return out
    if scale is not None and not (are_per_sample(x, scale, shift) and _are_beside(x, weight, bias)):
        return None
    return ops.layer_norm(x, shape, weight, bias, eps, **options.keywords(), dtype=dtype)


def _are_beside(x: Tensor, *affine: Tensor | None) -> bool:
    """Whether PyTorch's op takes these with ``x``: the formula of the op with a scale would cast others."""
    taken = (x.dtype, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else (x.dtype,)
    return x.is_floating_point() and all(t is None or t.dtype in taken for t in affine)


def permuted(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    """Of a contiguous image the result is channels_last, as the original's."""
    if x.dim() != 4 or activation != NONE or not autograd_only():  # vmap says of no image how it lies
        return None
    if not x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last):
        return None
    return ops.layer_norm(x.permute(0, 2, 3, 1), *given, dtype=dtype).permute(0, 3, 1, 2)


NORM = Norm(
    "layer_norm",
    (nn.LayerNorm,),
    F.layer_norm,
    ("normalized_shape", "weight=None", "bias=None", "eps=1e-5"),
    arguments,
    fused,
    lambda norm, x: Rows(norm, x).magnitudes(),
    (LayerNorm,),
    norm_forward("layer_norm", arguments),
    permuted,
    reads=("normalized_shape", "weight", "bias", "eps"),
    rows=True,
    widens=True,
)
