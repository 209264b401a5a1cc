"""When two results of a normalisation are the same: error bounds as pure functions of float64 tensors.

An element passes when ``|ours - ref| <= half an ulp of ref in the output's dtype + c 2^-24 A``, where ``ref`` is the
original site run in float64 and ``A`` the magnitude its sums run through in float32: an error of that size is what
float32 arithmetic makes, a forgotten bias or a wrong eps is far larger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.plan import Match

C: Mapping[str, float] = {
    # PyTorch's own CUDA ops stay below 1/2 of these limits on the shapes of tests/gpu; a factor 2 is left for shapes
    # that sum more terms in a row.
    "layer_norm": 4.0,
    "group_norm": 4.0,
    "rms_norm": 4.0,
    "l1_norm": 4.0,
    # A path through it rounds about twice as often: a matmul, a product with the scale, a norm, a matmul back.
    "linear_scale_batch_norm": 8.0,
}

_FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Magnitudes:
    """Float64 magnitudes A of the output, and of the gradients as a function of the cotangent dy: one tensor for
    "input" and one for each parameter's name. ``coarse`` bounds what a matmul in fewer bits than float32 adds."""

    output: Tensor
    gradients: Callable[[Tensor], dict[str, Tensor]]
    coarse: Tensor | None = None
    coarse_unit: float = 0.0


def half_ulp(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of ``dtype`` at each value of a float64 tensor."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(reference.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(reference, info.eps / 2), exponent - 1)


def error_share(ours: Tensor, reference: Tensor, magnitude: Tensor, c: float, extra: Tensor | float = 0.0) -> float:
    """The largest error as a share of its limit (1 is the limit), over elements finite in both.

    ``reference`` and ``magnitude`` are float64 and broadcast to ``ours``; ``extra`` is added to the limit.
    """
    reference = reference.expand(ours.shape)
    limit = half_ulp(reference, ours.dtype) + c * _FLOAT32_ROUNDING * magnitude + extra
    error = (ours.double() - reference).abs()
    finite = ours.isfinite() & reference.to(ours.dtype).isfinite()
    share = torch.where(finite & (error > 0), error / limit, 0.0)
    return float(share.max()) if share.numel() else 0.0


def mask_mismatch(ours: Tensor, eager: Tensor, reference: Tensor) -> str:
    """How the NaN and Inf of ours differ from PyTorch's, "" when they do not. Where PyTorch is not finite and the
    float64 reference is, PyTorch is the one that is wrong: not counted."""
    excused = ~eager.isfinite() & reference.expand(eager.shape).to(eager.dtype).isfinite()
    nan = int(((ours.isnan() != eager.isnan()) & ~excused).sum())
    inf = int(((ours.isinf() != eager.isinf()) & ~excused).sum())
    return f"NaN differs from PyTorch's in {nan} elements, Inf in {inf}" if nan or inf else ""


class RoundedMeans(torch.utils._python_dispatch.TorchDispatchMode):
    """Round every ``torch.mean`` to ``dtype`` and back: the cast that ``x / mean(|x|)`` makes on 16-bit tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.to(self.dtype).to(out.dtype) if func is torch.ops.aten.mean.dim else out


# --- magnitudes of each kind --------------------------------------------------------------------------------------


def magnitudes(match: Match, site: nn.Module, x: Tensor, dtype: torch.dtype, matmul_unit: float = 0.0) -> Magnitudes:
    """The magnitudes of ``site``, a float64 copy of the original in its own class, on the float64 input ``x``.

    ``dtype`` is the real input's; ``matmul_unit`` the unit roundoff of the real site's matmul where coarser than
    float32 (16-bit or TF32), else 0.
    """
    if match.kind == "linear_scale_batch_norm":
        return _linear_scale_batch_norm(match, site, x, matmul_unit)
    if match.kind == "l1_norm":
        return _l1_norm(int(match.attributes["dim"]), x, dtype)
    rows = _Rows(match.kind, site, x)
    return Magnitudes(rows.output(), rows.gradients)


class _Rows:
    """layer_norm, group_norm and rms_norm: rows of ``flat`` (*, N) with weight and bias that broadcast to it."""

    def __init__(self, kind: str, site: Any, x: Tensor) -> None:
        self.shape, self.weight, self.bias = x.shape, site.weight, getattr(site, "bias", None)
        self.group = kind == "group_norm"
        self.flat = x.reshape(x.shape[0], site.num_groups, -1) if self.group else self._rows(x, site.normalized_shape)
        eps = torch.finfo(torch.float32).eps if site.eps is None else site.eps
        square = self.flat.square().mean(-1, keepdim=True)
        self.centred = kind != "rms_norm"
        spread = self.flat.var(-1, correction=0, keepdim=True) if self.centred else square
        self.rstd = (spread + eps).rsqrt()
        self.xhat = self.rstd * (self.flat.abs() + (square.sqrt() if self.centred else 0.0))

    @staticmethod
    def _rows(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
        return x.reshape(*x.shape[: x.dim() - len(normalized_shape)], -1)

    def _affine(self, parameter: Tensor | None, absent: float) -> Tensor:
        if parameter is None:
            return torch.full((), absent, dtype=torch.float64, device=self.flat.device)
        if not self.group:
            return parameter.abs().reshape(-1)
        return parameter.abs().view(1, -1, *(1,) * (len(self.shape) - 2))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.reshape(self.shape) if self.group else flat

    def output(self) -> Tensor:
        out = self._shaped(self.xhat) * self._affine(self.weight, 1.0) + self._affine(self.bias, 0.0)
        return out.reshape(self.shape)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs() if self.group else dy.abs().reshape(self.flat.shape)
        g = (dy * self._affine(self.weight, 1.0)).reshape(self.flat.shape)
        through = g + self.xhat * (g * self.xhat).mean(-1, keepdim=True)
        if self.centred:
            through = through + g.mean(-1, keepdim=True)
        found = {"input": (self.rstd * through).reshape(self.shape)}
        for name, parameter, terms in (("weight", self.weight, dy * self._shaped(self.xhat)), ("bias", self.bias, dy)):
            if parameter is not None:
                kept = 1 if self.group else terms.dim() - 1
                found[name] = terms.sum([d for d in range(terms.dim()) if d != kept]).reshape(parameter.shape)
        return found


def _l1_norm(dim: int, x: Tensor, dtype: torch.dtype) -> Magnitudes:
    mean = x.abs().mean(dim, keepdim=True)
    size = x.abs() / mean
    if dtype is not torch.float32:
        # Where float32 arithmetic cannot tell to which side the mean rounds, either neighbour is right: one ulp.
        low, high = (mean * (1 - 2.0**-21)).to(dtype), (mean * (1 + 2.0**-21)).to(dtype)
        size = size * torch.where(low != high, torch.finfo(dtype).eps / (C["l1_norm"] * _FLOAT32_ROUNDING), 1.0)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        shared = (dy * x).abs().mean(dim, keepdim=True) / mean.square()
        return {"input": (dy.abs() / mean + shared) * (size / (x.abs() / mean)).nan_to_num(1.0, 1.0)}

    return Magnitudes(size, gradients)


def _linear_scale_batch_norm(match: Match, site: nn.Module, x: Tensor, unit: float) -> Magnitudes:
    names = match.attributes
    linear: Any = getattr(site, names["linear"])
    bn: Any = getattr(site, names["batch_norm"])
    scale: Tensor = getattr(site, names["scale"])
    batch = bn.training or bn.running_mean is None
    z = linear(x)
    sums = x.abs() @ linear.weight.abs().T + (0.0 if linear.bias is None else linear.bias.abs())
    u = z * scale
    mean, var = (u.mean(0), u.var(0, correction=0)) if batch else (bn.running_mean, bn.running_var)
    rstd = (var + bn.eps).rsqrt()
    gamma = torch.ones_like(rstd) if bn.weight is None else bn.weight.abs()
    beta = torch.zeros_like(rstd) if bn.bias is None else bn.bias.abs()
    gain = scale.abs() * rstd
    size = gain * (sums + sums.mean(0)) if batch else gain * sums + mean.abs() * rstd
    uhat = ((u - mean) * rstd).abs()
    # Errors of z also move the batch variance, and with it every row.
    out = gamma * (size + uhat * (uhat * size).mean(0) if batch else size) + beta
    coarse = gamma * gain * ((x.square() @ linear.weight.square().T).sqrt() + z.abs())
    if batch:
        coarse = coarse + gamma * uhat * (uhat * coarse).mean(0) + coarse.mean(0)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs()
        dz = gamma * gain * (dy + dy.mean(0) + size * (dy * size).mean(0) if batch else dy)
        ds = gamma * rstd * (dy * (sums + sums.mean(0))).sum(0)
        found = {
            "input": dz @ linear.weight.abs(),
            f"{names['linear']}.weight": dz.T @ x.abs(),
            f"{names['linear']}.bias": dz.sum(0),
            names["scale"]: (ds if scale.numel() > 1 else ds.sum()).reshape(scale.shape),
            f"{names['batch_norm']}.weight": (dy * size).sum(0),
            f"{names['batch_norm']}.bias": dy.sum(0),
        }
        return found

    return Magnitudes(out, gradients, coarse, unit)
