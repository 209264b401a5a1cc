"""The magnitude A that the sums of each kind run through in float32, output and gradients, for ``criterion``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.criterion import C_GRADIENT, FLOAT32_ROUNDING, SIXTEEN_BITS, C, Magnitudes
from normswap.plan import Match, is_by_hand


def magnitudes(match: Match, site: nn.Module, x: Tensor, dtype: torch.dtype, unit: float = 0.0) -> Magnitudes:
    """The magnitudes of ``site``, a float64 copy of the original in its own class as it was before the call, on the
    float64 input ``x``. ``dtype`` is the one that the original rounds to on the way; ``unit`` what ``matmul_unit`` says
    of the real input.
    """
    if match.kind == "linear_scale_batch_norm":
        return _Columns(match, site, x).magnitudes(unit)
    if match.kind == "l1_norm":
        dim, eps, minimum = (match.value(site, *of) for of in (("dim",), ("eps", 0.0), ("minimum",)))
        return l1_norm(x, dim, eps, minimum, dtype)
    if match.kind == "batch_norm":
        return batch_norm(site, x)
    if is_by_hand(match.kind, match.attributes):
        return rms_by_hand(match.attributes, site, x, dtype)
    rows = Rows(match.kind, match.view(site), x)
    gradients = (lambda dy: match.renamed(rows.gradients(dy))) if match.registered else rows.gradients
    return Magnitudes(rows.output(), gradients)


class Rows:
    """layer_norm, group_norm, instance_norm and rms_norm: rows of ``flat`` (*, N) with weight and bias that broadcast
    to it; ``channel`` is the dim that has a weight each in a group_norm or instance_norm."""

    def __init__(self, kind: str, site: Any, x: Tensor) -> None:
        self.shape, self.weight, self.bias = x.shape, site.weight, getattr(site, "bias", None)
        self.group = kind in ("group_norm", "instance_norm")
        self.channel = x.dim() - site._get_no_batch_dim() if kind == "instance_norm" else 1
        if self.group:
            groups = site.num_groups if kind == "group_norm" else x.shape[self.channel]
            self.flat = x.reshape(*x.shape[: self.channel], groups, -1)
        else:
            self.flat = self._rows(x, site.normalized_shape)
        eps = torch.finfo(torch.float32).eps if site.eps is None else site.eps
        square = self.flat.square().mean(-1, keepdim=True)
        self.centred = kind != "rms_norm"
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
        through = g + self.xhat * (g * self.xhat).mean(-1, keepdim=True)
        if self.centred:
            through = through + g.mean(-1, keepdim=True)
        found = {"input": (self.rstd * through).reshape(self.shape)}
        for name, parameter, terms in (("weight", self.weight, dy * self._shaped(self.xhat)), ("bias", self.bias, dy)):
            if parameter is not None:
                kept = self.channel if self.group else terms.dim() - 1
                found[name] = terms.sum([d for d in range(terms.dim()) if d != kept]).reshape(parameter.shape)
        return found


def batch_norm(site: Any, x: Tensor) -> Magnitudes:
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

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        dy = dy.abs()
        g = dy * weight
        through = g + xhat * (g * xhat).mean(kept, keepdim=True) + g.mean(kept, keepdim=True) if batch else g
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


def derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(leaf.clone()).sum(), leaf)  # it may write to what it is given
    return found


def rms_by_hand(attributes: Mapping[str, Any], site: Any, x: Tensor, dtype: torch.dtype) -> Magnitudes:
    """An RMSNorm along ``dim``, times ``weight_offset + weight``; in 16 bits it may round before the weight."""
    dim, name = attributes["dim"], attributes.get("weight", "")
    eps, offset = (
        getattr(site, given) if isinstance(given, str) else given
        for given in (attributes["eps"], attributes.get("weight_offset", 0.0))
    )
    weight = getattr(site, name) if name else None
    gain = None if weight is None else weight.detach().reshape(-1) + offset
    moved = x.movedim(dim, -1)
    rows = Rows("rms_norm", SimpleNamespace(weight=gain, eps=eps, normalized_shape=moved.shape[-1:]), moved)
    unit = torch.finfo(dtype).eps / 2 if attributes.get("cast_before_weight") and dtype in SIXTEEN_BITS else 0.0
    size = rows.output()
    if unit:
        size = size * _ulp_at_ties(rows.xhat, dtype, C["rms_norm"])

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        found = rows.gradients(dy.movedim(dim, -1))
        found["input"] = found["input"].movedim(-1, dim)
        if weight is not None:
            # Whether what meets dy is the rounded value or the one before: those errors are independent.
            terms = dy.movedim(dim, -1).reshape(rows.xhat.shape) * rows.xhat
            independent = 4 * unit / (C_GRADIENT["rms_norm"] * FLOAT32_ROUNDING) * terms.flatten(0, -2).norm(dim=0)
            found[name] = (found.pop("weight") + independent).reshape(weight.shape)
        return found

    return Magnitudes(size.movedim(-1, dim), gradients)


def _ulp_at_ties(value: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of a 16-bit ``dtype`` where float32 arithmetic cannot tell to which
    side ``value`` rounds, and either neighbour is right; 1 elsewhere."""
    low, high = (value * (1 - 2.0**-21)).to(dtype), (value * (1 + 2.0**-21)).to(dtype)
    return ulp_where(low != high, dtype, c)


def ulp_where(tie: Tensor, dtype: torch.dtype, c: float) -> Tensor:
    """What brings a limit of ``c 2^-24`` to one ulp of ``dtype`` where there is a tie; 1 elsewhere."""
    return torch.where(tie, torch.finfo(dtype).eps / (c * FLOAT32_ROUNDING), 1.0)


def l1_norm(x: Tensor, dim: int, eps: float, minimum: float | None, dtype: torch.dtype) -> Magnitudes:
    """``x / mean(|x|)`` along ``dim``, the mean clamped or added to."""
    mean = x.abs().mean(dim, keepdim=True)
    divisor = (mean if minimum is None else mean.clamp(min=minimum)) + eps
    # An error of the mean's own is passed on to what it is divided by, which a negative eps makes smaller.
    size = x.abs() / divisor.abs() * ((mean + abs(eps)) / divisor.abs()).clamp(min=1.0)
    wider = torch.ones_like(mean)
    if dtype in SIXTEEN_BITS:
        # Where float32 arithmetic cannot tell to which side one of these rounds, either neighbour is right: one ulp.
        low, high = (_rounded_divisor(mean, eps, minimum, dtype, side * 2.0**-21) for side in (-1, 1))
        wider = ulp_where(low != high, dtype, C["l1_norm"])

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        shared = (dy * x).abs().mean(dim, keepdim=True) / divisor.square()
        return {"input": (dy.abs() / divisor.abs() + shared) * wider}

    return Magnitudes(size * wider, gradients)


def euclidean(x: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Magnitudes:
    """``x / max(norm, eps)``, the norm along one dim, or a single one."""
    divisor = norm.clamp(min=eps) if eps else norm
    wider = torch.ones_like(norm)
    if dtype in SIXTEEN_BITS:
        low, high = (_rounded_divisor(norm, 0.0, eps, dtype, side * 2.0**-21) for side in (-1, 1))
        wider = ulp_where(low != high, dtype, C["l1_norm"])
    dims = [d for d in range(x.dim()) if norm.dim() == 0 or norm.shape[d] == 1]

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        shared = (dy * x).abs().sum(dims, keepdim=True) / divisor.square() / norm
        return {"input": (dy.abs() / divisor + x.abs() * shared.nan_to_num(0.0)) * wider}

    return Magnitudes(x.abs() / divisor * wider, gradients)


def _rounded_divisor(mean: Tensor, eps: float, minimum: float | None, dtype: torch.dtype, error: float) -> Tensor:
    """The divisor in ``dtype`` after each step's rounding there, with a relative ``error`` before each."""
    divisor = (mean * (1 + error)).to(dtype)
    if minimum is not None:
        divisor = divisor.double().clamp(min=minimum * (1 + error)).to(dtype)
    return ((divisor.double() + eps) * (1 + error)).to(dtype) if eps else divisor


class _Columns:
    """linear_scale_batch_norm: u = scale * linear(x) for x (N, K), normalised column by column to uhat; the output is
    that times ``after``.

    ``sums`` is the magnitude of linear(x), ``size`` that of uhat, ``coarse`` (of u) what a matmul with rounded operands
    and a rounded result moves it by, in unit roundoffs: its K errors are independent, hence the root of squares.
    """

    def __init__(self, match: Match, site: nn.Module, x: Tensor) -> None:
        self.x, self.names = x, _parts(match)
        children: Any = site._modules
        self.linear, self.bn = children[self.names["linear"]], children[self.names["batch_norm"]]
        self.scale, self.after = (self._value(site, self.names.get(part, 1.0)) for part in ("scale", "after"))
        self.batch = bool(self.bn.training or self.bn.running_mean is None)
        z, bias = self.linear(x), self.linear.bias
        u, slope = z * self.scale, self.scale.abs()
        self.sums = x.abs() @ self.linear.weight.abs().T + (0.0 if bias is None else bias.abs())
        mean, self.var = (
            (u.mean(0), u.var(0, correction=0)) if self.batch else (self.bn.running_mean, self.bn.running_var)
        )
        self.rstd = (self.var + self.bn.eps).rsqrt()
        weight, offset = self.bn.weight, self.bn.bias
        self.gamma = torch.ones_like(self.rstd) if weight is None else weight.abs()
        self.beta = torch.zeros_like(self.rstd) if offset is None else offset.abs()
        self.gain = slope * self.rstd
        self.centred = (u - mean).abs()
        self.uhat = self.centred * self.rstd
        self.size = self.gain * self.sums + (self.gain * self.sums.mean(0) if self.batch else mean.abs() * self.rstd)
        self.coarse = slope * ((x.square() @ self.linear.weight.square().T).sqrt() + z.abs())

    def _value(self, site: Any, factor: str | float) -> Tensor:
        """A factor as a tensor: an attribute of the site or of a child, or a number."""
        if isinstance(factor, str):
            child, _, name = factor.rpartition(".")
            factor = getattr(site.get_submodule(child), name)
        return torch.as_tensor(factor, dtype=torch.float64, device=self.x.device)

    def magnitudes(self, unit: float) -> Magnitudes:
        coarse = self.coarse * self.rstd
        if self.batch:
            coarse = self._through(coarse + coarse.mean(0))
        else:  # folding rounds the new bias too
            coarse = self._through(coarse + self.size - self.gain * self.sums) + self.beta
        output, after = self._through(self.size) + self.beta, self.after.abs()
        buffers, coarse_buffers = self._buffers()
        return Magnitudes(output * after, self.gradients, coarse * after, unit, buffers, coarse_buffers)

    def _through(self, error: Tensor) -> Tensor:
        """What errors of that size in uhat do to the output: in a batch they move the variance, and so every row."""
        return self.gamma * (error + self.uhat * (self.uhat * error).mean(0) if self.batch else error)

    def gradients(self, dy: Tensor) -> dict[str, Tensor]:
        behind, dy = dy.abs(), (dy * self.after).abs()
        du = self._input_gradient(dy)
        dz = self.gamma * self.gain * du
        linear, bn, scale, after = (self.names.get(part, 0.0) for part in ("linear", "batch_norm", "scale", "after"))
        found = {
            "input": dz @ self.linear.weight.abs(),
            f"{linear}.weight": dz.T @ self.x.abs(),
            f"{linear}.bias": dz.sum(0),
            f"{bn}.weight": (dy * self.size).sum(0),
            f"{bn}.bias": dy.sum(0),
        }
        ofs = (scale, self.scale, self.gamma * self.rstd * du * self.sums)
        for name, factor, terms in (ofs, (after, self.after, behind * (self._through(self.size) + self.beta))):
            if isinstance(name, str):
                columns = (terms.sum(0) if factor.numel() > 1 else terms.sum()).reshape(factor.shape)
                found[name] = found.get(name, 0.0) + columns
        return found

    def _input_gradient(self, dy: Tensor) -> Tensor:
        """Terms of dy - mean(dy) - uhat mean(dy uhat), and what an error of uhat does to them: through each uhat, and
        through rstd in front of all."""
        if not self.batch:
            return dy
        terms = dy + dy.mean(0) + self.uhat * (dy * self.uhat).mean(0)
        moved = self.size * (dy * self.uhat).mean(0) + self.uhat * (dy * self.size).mean(0)
        return terms * (1 + (self.uhat * self.size).mean(0)) + moved

    def _buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Magnitudes of the running statistics after a call in training, and what a coarse matmul adds to them."""
        bn, rows = self.bn, len(self.x)
        if not bn.training or bn.running_mean is None or rows < 2:
            return {}, {}
        tracked = 0.0 if bn.num_batches_tracked is None else float(bn.num_batches_tracked)
        new = 1.0 / (tracked + 1.0) if bn.momentum is None else bn.momentum
        unbiased = new * rows / (rows - 1)
        error = self.scale.abs() * self.sums
        spread = 2 * (self.centred * (error + error.mean(0))).mean(0)
        mean, var = (f"{self.names['batch_norm']}.running_{statistic}" for statistic in ("mean", "var"))
        size = {
            mean: (1 - new) * bn.running_mean.abs() + new * error.mean(0),
            var: (1 - new) * bn.running_var.abs() + unbiased * (self.var + spread),
        }
        coarse = {mean: new * self.coarse.mean(0), var: unbiased * 2 * (self.centred * self.coarse).mean(0)}
        return size, coarse


def _parts(match: Match) -> Mapping[str, str | float]:
    """The parts of linear_scale_batch_norm by their paths in the site; in an nn.Sequential the scale is a child's."""
    if "runs" not in match.attributes:
        return match.attributes
    (run,) = match.attributes["runs"]
    return {**run, "scale": f"{run['scale']}.{run['attribute']}"} if "scale" in run else run
