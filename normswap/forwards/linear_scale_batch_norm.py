"""``batch_norm(linear(x) * scale) * after`` at once, while each of the two is still the plain module it was. Nothing is
kept from one call to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.forwards.batch_norm import updated_by
from normswap.forwards.plain import calls_forward, is_plain, is_unhooked
from normswap.forwards.replaced import fingerprint
from normswap.ops import at_once
from normswap.ops.dispatch import PLAIN, needs_grad

_DEVICES = ("cpu", "cuda")
FEW = 2**22
"""Elements up to which a fold with gradients saves the device less, some passes over them, than it costs the host."""


# --- the computation ----------------------------------------------------------------------------------------------


def linear_scale_batch_norm(
    x: Any,
    linear: Any,
    scale: Tensor | float | None,
    bn: Any,
    after: Tensor | float | None = None,
    activation: Activation = NONE,
    residual: Tensor | None = None,
    is_norm: Callable[[Any], bool] = lambda bn: is_plain(bn, nn.BatchNorm1d),
) -> Tensor | None:
    """``bn(linear(x) * scale) * after`` or, without ``after``, ``activation(... + residual)``; None where only the
    original code is sure to be right: a child that is no longer a plain one (hooks, LoRA, parametrizations), an input
    that is not (N, K), autocast, tensors of other dtypes, devices or types, torch.export and torch.jit.trace."""
    if type(x) not in PLAIN:
        return None
    if residual is not None and not is_output(residual, x, getattr(linear, "out_features", None)):
        return None
    if after is None and not torch.compiler.is_compiling():
        out: Tensor | None = at_once.folded_linear(x, linear, scale, bn, nn.Linear, nn.BatchNorm1d)
        if out is not None:
            return activation(out if residual is None else out + residual)
    if not (x.dim() == 2 and is_plain(linear, nn.Linear) and is_norm(bn)):
        return None
    projection, norm = (linear.weight, linear.bias), (bn.running_mean, bn.running_var, bn.weight, bn.bias)
    if not x.is_floating_point() or linear.out_features != bn.num_features or (norm[0] is None) != (norm[1] is None):
        return None
    if x.device.type not in _DEVICES or torch.is_autocast_enabled(x.device.type) or _is_recorded():
        return None
    factors = [_factor(value, x, linear.out_features) for value in (scale, after)]
    if not all(fits for fits, _ in factors) or not tensors_fit(x, projection, norm):
        return None
    (_, before), (_, behind) = factors
    parts = x, linear, projection, before, bn, norm
    # In training the factor may be a running statistic, which the norm updates first.
    if behind is None or (x.dtype is torch.float32 and not bn.training):
        return _normalised(*parts, behind, activation, residual)
    out = _normalised(*parts, None, NONE, None)  # gamma * after would round once more than the original
    return None if out is None else out * behind


def is_output(residual: Any, x: Tensor, channels: Any) -> bool:
    """Whether it is such as what a Linear gives of ``x`` (N, K)."""
    return _is_beside(residual, x) and residual.dtype is x.dtype and residual.shape == (*x.shape[:1], channels)


_Projection: TypeAlias = "tuple[Tensor, Tensor | None]"
"""Weight and bias."""
_Norm: TypeAlias = "tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]"
"""Running mean and variance, weight and bias: read once, as each costs a call of nn.Module.__getattr__."""


def _normalised(
    x: Tensor,
    linear: nn.Linear,
    projection: _Projection,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    norm: _Norm,
    after: Tensor | None,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor | None:
    behind: dict[str, Any] = {"activation": activation, "residual": residual}
    mean, var, weight, bias = norm
    if after is not None:
        column = after.reshape(-1).expand(bn.num_features)
        weight = column.contiguous() if weight is None else weight * column
        bias = None if bias is None else bias * column
    if bn.training or mean is None or var is None:
        return _train(x, linear, projection, scale, bn, (weight, bias), behind) if x.shape[0] > 1 else None
    statistics = (mean, var, weight, bias)
    if not (bn.eps > 0 and shapes_fit(*projection, *statistics)):
        return None
    learns = needs_grad(x, scale, after, *projection, weight, bias, residual)
    # In float16 a gradient may leave the range of one and not of the other.
    fits = learns and x.is_cuda and x.dtype is not torch.float16
    served = fits and ops.native_serves(x, *projection, scale, *statistics)
    if served and x.shape[0] * linear.out_features <= FEW:
        return ops.scale_batch_norm(linear(x), scale, *statistics, False, 0.0, bn.eps, **behind)
    if x.shape[0] > linear.in_features and x.dtype is not torch.float64:
        # dy^T x, of which a folded backward makes all gradients, may leave float16's range where PyTorch's does not.
        if learns and (_is_transformed() or x.dtype is torch.float16):
            return None
        out = ops.folded_linear(x, projection[0], projection[1], scale, *statistics, bn.eps)
        return activation(out if residual is None else out + residual)
    if learns and not served:
        return None
    return ops.scale_batch_norm(linear(x), scale, *statistics, False, 0.0, bn.eps, **behind)


def _train(
    x: Tensor,
    linear: nn.Linear,
    projection: _Projection,
    scale: Tensor | None,
    bn: nn.BatchNorm1d,
    affine: tuple[Tensor | None, Tensor | None],
    behind: Mapping[str, Any],
) -> Tensor:
    """BatchNorm of ``linear(x) * scale`` with batch statistics, updating the buffers exactly as nn.BatchNorm1d.forward
    does."""
    weight, bias = projection
    z, input_bias = (F.linear(x, weight), bias) if _norm_adds_bias(x, weight, bias, scale) else (linear(x), None)
    mean, var, momentum, batches = updated_by(bn)
    more = {"input_bias": input_bias, "num_batches_tracked": batches, **behind}
    return ops.scale_batch_norm(z, scale, mean, var, *affine, True, momentum, bn.eps, **more)


def _norm_adds_bias(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> bool:
    """True where the Linear is better run without its bias, which batch statistics cancel in all but the running mean,
    and our kernels put it there: the product is faster, in TF32, and rounds nothing at a large bias. In 16 bits the
    product is slower without."""
    return (
        x.dtype is torch.float32
        and bias is not None
        and bias.shape == weight.shape[:1]
        and not torch.compiler.is_compiling()
        and ops.native_serves(x, weight, bias, scale)
    )


def _factor(value: Any, x: Tensor, channels: int) -> tuple[bool, Tensor | None]:
    """(usable, tensor or None): ``value`` as a tensor of one value or one per channel in x's dtype."""
    if value is None:
        return True, None
    if type(value) in (int, float):
        exact = x.dtype in (torch.float32, torch.float64) or _is_short(value)
        return (True, x.new_full((), value)) if exact else (False, None)
    fits = is_factor(value, x, channels)
    return fits, value if fits else None


def is_factor(value: Any, like: Tensor, channels: int) -> bool:
    """True for a plain tensor of one value, or one per channel, in the dtype and on the device of ``like``."""
    return (
        type(value) in PLAIN
        and value.dtype == like.dtype
        and value.device == like.device  # PyTorch takes a () tensor of the CPU beside one of a GPU
        and value.shape in ((), (1,), (channels,), (1, channels))
    )


def _is_short(number: float) -> bool:
    """True when float16 and bfloat16 hold ``number`` exactly: PyTorch multiplies by a number at float32 precision."""
    mantissa, exponent = math.frexp(number)
    return -13 <= exponent <= 9 and (mantissa * 256).is_integer()


def tensors_fit(like: Tensor, of_linear: Iterable[Tensor | None], of_norm: Iterable[Tensor | None]) -> bool:
    """True when PyTorch too would take these with an input ``like`` that, and all are plain tensors."""
    device, own, dtype = like.device, like.dtype, None
    for tensor in of_linear:
        if tensor is not None and not (type(tensor) in PLAIN and tensor.device == device and tensor.dtype is own):
            return False
    for vector in of_norm:
        if vector is not None:
            if type(vector) not in PLAIN or vector.device != device or vector.dtype is not (dtype or vector.dtype):
                return False
            dtype = vector.dtype
    return dtype in (None, own) or (dtype is torch.float32 and own in (torch.float16, torch.bfloat16))


def shapes_fit(weight: Tensor, *vectors: Tensor | None) -> bool:
    """Whether there is one value a channel: PyTorch's ops refuse vectors of others, which a fold would spread."""
    return weight.dim() == 2 and all(v is None or v.shape == weight.shape[:1] for v in vectors)


def _is_beside(tensor: Any, like: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.device == like.device


def _is_transformed() -> bool:
    """True under functorch or forward-mode AD, which an autograd Function does not serve."""
    return not torch.compiler.is_compiling() and not ops.autograd_only()


def _is_recorded() -> bool:
    """True where the comparison of N with K, or whether gradients are wanted, would be written into a program."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch.jit.is_tracing()


# --- a child that multiplies -----------------------------------------------------------------------------------------


def multiplies(child: nn.Module, code: str) -> bool:
    """True when calling ``child`` runs the forward that was found to multiply its input by an attribute."""
    if torch.compiler.is_compiling():  # a code object cannot be looked at there; the children are inlined as they are
        return False
    cls: Any = type(child)
    return calls_forward(cls) and is_unhooked(child) and fingerprint(cls.forward) == code
