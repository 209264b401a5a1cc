"""Linear -> scale -> BatchNorm with fixed statistics, as one Linear whose weight is folded anew on every call."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from normswap import reference
from normswap.ops.dispatch import needs_grad
from normswap.ops.scale_batch_norm import fold_scale_batch_norm


def folded_linear(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``batch_norm(linear(input) * scale)`` in eval for ``input`` (N, K): one matmul and O(K C) besides.

    ``linear_weight`` is (C, K), ``scale`` None or of shape (), (1,), (C,) or (1, C), the other vectors (C,). Nothing is
    kept from call to call. Differentiable any number of times in all but the statistics. Worth it where N > K.
    """
    learns = needs_grad(input, linear_weight, linear_bias, scale, weight, bias)
    fold = reference.fold_scale_batch_norm if learns else fold_scale_batch_norm
    folded = fold(linear_weight, linear_bias, scale, running_mean, running_var, weight, bias, eps)
    return F.linear(input, *folded)
