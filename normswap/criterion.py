"""When two results of a normalisation are the same: error bounds as pure functions of float64 tensors, and the
magnitudes that the sums of several kinds of norm run through.

An element passes when ``|ours - ref| <= half an ulp of ref in the output's dtype + c 2^-24 A``, where ``ref`` is the
original site run in float64 and ``A`` the magnitude its sums run through in float32: an error of that size is what
float32 arithmetic makes, a forgotten bias or a wrong eps is far larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_STATISTICS = (_aten.mean, _aten.norm, _aten.linalg_vector_norm)
_OF_A_NUMBER = (_aten.add.Tensor, _aten.add.Scalar, _aten.clamp.default, _aten.clamp_min.default)

FLOAT32_ROUNDING = 2.0**-24
_PIECE = 2**20  # elements of a large tensor that are computed with at once
SIXTEEN_BITS = (torch.float16, torch.bfloat16)

_PYTORCH_ROUNDINGS = 4.0
"""What a gradient or a buffer may miss by, in unit roundoffs of its dtype times A, where PyTorch's own code serves: on
a CPU it sums weight gradients in 16 bits, rounds between the ops of an expression and mixes running statistics in
their dtype. Its worst over hundreds of random cases is 1. Not granted where our kernels ran: those round once."""


@dataclass(frozen=True)
class Magnitudes:
    """Float64 magnitudes A of the output, of the gradients as a function of the cotangent dy (one tensor for "input"
    and one for each parameter's name) and of buffers after the call. ``coarse`` and ``coarse_buffers`` bound what a
    matmul with unit roundoff ``coarse_unit``, where coarser than float32's, adds."""

    output: Tensor
    gradients: Callable[[Tensor], dict[str, Tensor]]
    coarse: Tensor | None = None
    coarse_unit: float = 0.0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    coarse_buffers: Mapping[str, Tensor] = field(default_factory=dict)


_EXPONENT = 0x7FF << 52
"""The bits of a float64 without which it is a power of two, or infinite."""


def half_ulp(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of ``dtype`` at each value of a float64 tensor."""
    info = torch.finfo(dtype)
    power = reference.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)  # of two, not above its size
    return power.clamp_(min=info.tiny).mul_(info.eps / 2)


def rounds_further(reference: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """What half an ulp grows by where a value off by ``error`` lies beyond a power of two."""
    return half_ulp(reference.abs() + error, dtype).sub_(half_ulp(reference, dtype))


def limit_of(reference: Tensor, dtype: torch.dtype, magnitude: Tensor, c: float, extra: Tensor | float) -> Tensor:
    """How far a value of ``dtype`` may lie off."""
    limit = half_ulp(reference, dtype)
    return torch.add(limit, magnitude, alpha=c * FLOAT32_ROUNDING) + extra


def error_share(ours: Tensor, reference: Tensor, magnitude: Tensor, c: float, extra: Tensor | float = 0.0) -> float:
    """The largest error as a share of its limit (1 is the limit), over elements finite in both.

    ``reference`` and ``magnitude`` are float64 and broadcast to ``ours``; ``extra`` is added to the limit. An error
    without a limit (a NaN in it) is infinitely too large.
    """
    given = (ours, reference, magnitude, torch.as_tensor(extra, dtype=torch.float64, device=ours.device))
    pieces = zip(*(small_parts(tensor.expand(ours.shape)) for tensor in given), strict=True)
    return max((_share(o, r, m, e, c) for o, r, m, e in pieces), default=0.0)


def small_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of ``tensor`` small enough to compute with, along its largest dim; none of an empty one."""
    if tensor.numel() == 0:
        return ()
    if tensor.numel() <= _PIECE:
        return (tensor,)
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    return tensor.split(max(1, _PIECE * tensor.shape[dim] // tensor.numel()), dim)


def _share(ours: Tensor, reference: Tensor, magnitude: Tensor, extra: Tensor, c: float) -> float:
    limit = limit_of(reference, ours.dtype, magnitude, c, extra)
    error = (ours.double() - reference).abs()
    finite = ours.isfinite() & reference.to(ours.dtype).isfinite()
    share = torch.where(finite & (error > 0), error / limit, 0.0)
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())


def excused(eager: Tensor, reference: Tensor) -> Tensor:
    """Where PyTorch is not finite and the float64 reference is: PyTorch is the one that is wrong there."""
    return ~eager.isfinite() & reference.expand(eager.shape).to(eager.dtype).isfinite()


def mask_mismatch(ours: Tensor, eager: Tensor, reference: Tensor) -> str:
    """How the NaN and Inf of ours differ from PyTorch's, "" when they do not. Where PyTorch is not finite, nothing is
    counted if the float64 reference is, nor what the reference rounds to: an Inf where PyTorch's overflowed on the
    way, and is NaN."""
    rounded = reference.expand(eager.shape).to(eager.dtype)
    counted = eager.isfinite() | ~(rounded.isfinite() | (eager.isnan() & (ours == rounded)))
    nan = int(((ours.isnan() != eager.isnan()) & counted).sum())
    inf = int(((ours.isinf() | eager.isinf()) & (ours != eager) & counted).sum())
    return f"NaN differs from PyTorch's in {nan} elements, Inf in {inf}" if nan or inf else ""


def matmul_unit(x: Tensor) -> float:
    """The unit roundoff of a matmul of ``x`` here and now where coarser than float32's (16 bits, TF32), else 0."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype in SIXTEEN_BITS:
        return torch.finfo(dtype).eps / 2
    # Not allow_tf32: reading it raises once anybody has set the newer fp32_precision.
    return 2.0**-11 if x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32" else 0.0


def own_rounding(dtype: torch.dtype, kernel_ran: bool) -> float:
    """What the limit of a gradient or buffer gains per A where PyTorch's own code serves, else 0."""
    return 0.0 if kernel_ran else _PYTORCH_ROUNDINGS * torch.finfo(dtype).eps / 2


class RoundedStatistics(torch.utils._python_dispatch.TorchDispatchMode):
    """Round every mean and norm, and what a number is added to or clamps, to ``dtype`` and back: the casts that
    ``x / (mean(|x|) + eps)`` makes on 16-bit tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A sum of two tensors is the backward's, which accumulates gradients.
        rounds = func.overloadpacket in _STATISTICS or (func in _OF_A_NUMBER and not isinstance(args[1], Tensor))
        return out.to(self.dtype).to(out.dtype) if rounds else out


# --- what magnitudes of several kinds are made of --------------------------------------------------------------------


def input_gradient(g: Tensor, xhat: Tensor, size: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """Terms of g - mean(g) - xhat mean(g xhat), all of them not negative, and what errors of xhat do to them, of the
    order of ``size``: through each xhat, and through rstd in front of all."""
    xhat = torch.add(xhat, size, alpha=4 * FLOAT32_ROUNDING)  # as it may be: what is zero is multiplied by errors too
    of_xhat, of_rstd = mean(g * xhat), 1 + mean(xhat * size)
    moved = (xhat * mean(g * size)).addcmul_(size, of_xhat)
    return xhat.mul_(of_xhat).add_(g).add_(mean(g)).mul_(of_rstd).add_(moved)


def centred_gradient(g: Tensor, xhat: Tensor, size: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
    """The same where every xhat is off by no more than float32's roundings of its ``size``: no more than its terms with
    that in place of xhat, which far from zero, where an error is multiplied by an error so, is much more."""
    whole = (size * mean(g * size)).add_(g).add_(mean(g))
    return torch.minimum(whole, input_gradient(g, xhat, size, mean))


class Rows:
    """Rows of ``flat`` (*, N) with weight and bias that broadcast to it: the last dims of ``x``, or with ``groups``
    those of the dim ``channel``, which has a weight each. Their mean is taken from them where they are ``centred``."""

    def __init__(self, site: Any, x: Tensor, centred: bool = True, groups: int = 0, channel: int = 1) -> None:
        self.shape, self.weight, self.bias = x.shape, site.weight, getattr(site, "bias", None)
        self.group, self.channel, self.centred = groups > 0, channel, centred
        self.flat = x.reshape(*x.shape[:channel], groups, -1) if groups else self._rows(x, site.normalized_shape)
        eps = torch.finfo(torch.float32).eps if site.eps is None else site.eps
        square = self.flat.square().mean(-1, keepdim=True)
        spread = self.flat.var(-1, correction=0, keepdim=True) if self.centred else square
        self.rstd = (spread + eps).rsqrt()
        self.xhat = self.rstd * (self.flat.abs() + (square.sqrt() if self.centred else 0.0))

    @staticmethod
    def _rows(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
        lead = x.shape[: x.dim() - len(normalized_shape)] or (1,)  # the whole tensor may be one row
        return x.reshape(*lead, -1)

    def _affine(self, parameter: Tensor | None, absent: float) -> Tensor:
        if parameter is None:
            return torch.full((), absent, dtype=torch.float64, device=self.flat.device)
        if not self.group:
            return parameter.abs().reshape(-1)
        return parameter.abs().view(-1, *(1,) * (len(self.shape) - self.channel - 1))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(self.shape) if self.group else flat

    def output(self) -> Tensor:
        out = self._shaped(self.xhat) * self._affine(self.weight, 1.0) + self._affine(self.bias, 0.0)
        return out.reshape(self.shape)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs() if self.group else dy.abs().reshape(self.flat.shape)
        g = (dy * self._affine(self.weight, 1.0)).reshape(self.flat.shape)
        if self.centred:
            xhat = (self.flat - self.flat.mean(-1, keepdim=True)).abs_().mul_(self.rstd)
            through = centred_gradient(g, xhat, self.xhat, lambda values: values.mean(-1, keepdim=True))
            del xhat
        else:
            through = (self.xhat * (g * self.xhat).mean(-1, keepdim=True)).add_(g)
        found = {"input": through.mul_(self.rstd).reshape(self.shape)}
        del g
        for name, parameter, terms in (("weight", self.weight, dy * self._shaped(self.xhat)), ("bias", self.bias, dy)):
            if parameter is not None:
                kept = self.channel if self.group else terms.dim() - 1
                found[name] = terms.sum([d for d in range(terms.dim()) if d != kept]).reshape(parameter.shape)
        return found

    def magnitudes(self) -> Magnitudes:
        """Of the output and of the gradients."""
        return Magnitudes(self.output(), self.gradients)


def derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf.clone()).sum(), leaf)  # it may write to what it is given
    return found


def ulp_at_ties(value: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of a 16-bit ``dtype`` where float32 arithmetic cannot tell to which
    side ``value`` rounds, and either neighbour is right; 1 elsewhere."""
    low, high = (value * (1 - 2.0**-21)).to(dtype), (value * (1 + 2.0**-21)).to(dtype)
    return ulp_where(low != high, dtype, c)


def ulp_where_rounded(divisor: Tensor, eps: float, minimum: float | None, dtype: torch.dtype, c: float = 4.0) -> Tensor:
    """The same where a ``divisor`` is rounded to ``dtype`` after each step: clamped to ``minimum``, ``eps`` added."""
    if dtype not in SIXTEEN_BITS:
        return torch.ones_like(divisor)
    low, high = (_rounded(divisor, eps, minimum, dtype, side * 2.0**-21) for side in (-1, 1))
    return ulp_where(low != high, dtype, c)


def ulp_where(tie: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of ``dtype`` where there is a tie; 1 elsewhere."""
    return torch.where(tie, torch.finfo(dtype).eps / (c * FLOAT32_ROUNDING), 1.0)


def _rounded(divisor: Tensor, eps: float, minimum: float | None, dtype: torch.dtype, error: float) -> Tensor:
    """With a relative ``error`` before each rounding."""
    divisor = (divisor * (1 + error)).to(dtype)
    if minimum is not None:
        divisor = divisor.double().clamp(min=minimum * (1 + error)).to(dtype)
    return ((divisor.double() + eps) * (1 + error)).to(dtype) if eps else divisor
