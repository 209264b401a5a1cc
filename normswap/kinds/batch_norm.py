"""BatchNorm over each channel of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import Activation
from normswap.criterion import Magnitudes, centred_gradient
from normswap.forwards.batch_norm import RANKS, batch_norm, make_forward, ranks_of
from normswap.kinds.norm import Norm, is_alike
from normswap.ops.dispatch import needs_grad


def arguments(norm: Any, x: Tensor) -> tuple[Any, ...] | None:
    return (norm,) if x.dim() in ranks_of(norm) and x.shape[1] == norm.num_features else None


def fused(
    x: Tensor, given: Any, before: Any, behind: Any, scale: Any, shift: Any, activation: Activation, dtype: Any
) -> Any:
    """``given``: the module, or what its function takes."""
    if not is_alike(x, behind):
        return None
    if len(given) == 1:
        return batch_norm(given[0], x, activation, behind)
    mean, var, weight, bias, training, momentum, eps = given
    if training and type(momentum) in (int, float):
        return ops.batch_norm(x, mean, var, weight, bias, True, momentum, eps, activation, residual=behind)
    if training or needs_grad(x, weight, bias, behind) or mean is None or var is None:
        return None
    return ops.batch_norm_eval(x, mean, var, weight, bias, eps, activation, residual=behind)


def magnitudes(site: Any, x: Tensor) -> Magnitudes:
    """A BatchNorm as it is before the call: by running statistics, or by those of ``x``, with which it updates them."""
    kept = [d for d in range(x.dim()) if d != 1]
    batch = site.training or (site.running_mean is None and site.running_var is None)

    def column(values: Tensor) -> Tensor:
        return values.reshape(1, -1, *(1,) * (x.dim() - 2))

    def affine(values: Tensor | None, absent: float) -> Tensor:
        return torch.full_like(x[:1, :1], absent) if values is None else column(values.abs())

    mean, var = (x.mean(kept), x.var(kept, correction=0)) if batch else (site.running_mean, site.running_var)
    size = column(x.square().mean(kept).sqrt() if batch else mean.abs())
    rstd = column((var + site.eps).rsqrt())
    xhat, weight = rstd * (x.abs() + size), affine(site.weight, 1.0)

    def along(values: Tensor) -> Tensor:
        return values.mean(kept, keepdim=True)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs()
        g = dy * weight
        through = centred_gradient(g, rstd * (x - column(mean)).abs(), xhat, along) if batch else g
        found = {"input": rstd * through}
        if site.weight is not None:
            found |= {"weight": (dy * xhat).sum(kept), "bias": dy.sum(kept)}
        return found

    output = xhat * weight + affine(site.bias, 0.0)
    return Magnitudes(output, gradients, buffers=_running(site, x, column(mean), var) if batch else {})


def _running(site: Any, x: Tensor, mean: Tensor, var: Tensor) -> dict[str, Tensor]:
    """Magnitudes of the running statistics after a call in training."""
    kept = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // max(1, x.shape[1])
    if not site.training or site.running_mean is None or count < 2:
        return {}
    tracked = 0.0 if site.num_batches_tracked is None else float(site.num_batches_tracked)
    new = 1.0 / (tracked + 1.0) if site.momentum is None else site.momentum
    size = x.abs()
    spread = 2 * ((x - mean).abs() * (size + size.mean(kept, keepdim=True))).mean(kept)
    return {
        "running_mean": (1 - new) * site.running_mean.abs() + new * size.mean(kept),
        "running_var": (1 - new) * site.running_var.abs() + new * count / (count - 1) * (var + spread),
    }


def sample(norm: Any) -> tuple[int, ...]:
    if isinstance(norm, nn.Module):
        return (3, norm.num_features, *(5, 4, 3)[: ranks_of(norm)[-1] - 2])  # type: ignore[arg-type]
    return (3, next((t.numel() for t in (norm.running_mean, norm.weight) if t is not None), 5), 5, 4)


NORM = Norm(
    "batch_norm",
    (*RANKS,),
    F.batch_norm,
    ("running_mean", "running_var", "weight=None", "bias=None", "training=False", "momentum=0.1", "eps=1e-5"),
    arguments,
    fused,
    magnitudes,
    forward=make_forward,
    updates=("running_mean", "running_var"),
    batched=True,
    # In eval PyTorch's op, one pass, is as fast, and what stands behind it is a region's.
    alone=lambda norm: "" if norm.training else None,
    sample=sample,
)
