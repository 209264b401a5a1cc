"""Division by the Frobenius norm of the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from normswap import ops
from normswap.criterion import Magnitudes
from normswap.kinds.kind import Kind
from normswap.kinds.l2_norm import euclidean
from normswap.ops.dispatch import autocasts

FORMULA = "x / norm(x)"


def call(x: Tensor) -> Tensor | None:
    serves = x.dim() > 0 and (x.dtype is torch.float32 or not autocasts(x))
    return ops.frobenius_norm(x) if serves else None


def magnitudes(x: Tensor, dtype: torch.dtype) -> Magnitudes:
    return euclidean(x, x.norm(), 0.0, dtype)


KIND = Kind("frobenius_norm", FORMULA, (), call, magnitudes, lambda: (4, 33))
