"""A Linear, a scale or none, a BatchNorm1d, and a factor behind it or none: ``bn(linear(x) * scale) * after``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normswap.criterion import Magnitudes
from normswap.forwards.linear_scale_batch_norm import make_forward
from normswap.kinds.layers import Layers
from normswap.plan import Match


class _Columns:
    """u = scale * linear(x) for x (N, K), normalised column by column to uhat; the output is
    that times ``after``.

    ``sums`` is the magnitude of linear(x), ``size`` that of uhat, ``coarse`` (of u) what a matmul with rounded operands
    and a rounded result moves it by, in unit roundoffs: its K errors are independent, hence the root of squares.
    """

    def __init__(self, match: Match, site: nn.Module, x: Tensor) -> None:
        self.x, self.names = x, match.attributes
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


def sample(match: Match, module: Any) -> tuple[int, ...]:
    return (24, getattr(module, match.attributes["linear"]).in_features)


LAYERS = Layers(
    "linear_scale_batch_norm",
    make_forward,
    lambda match, module, x, unit: _Columns(match, module, x).magnitudes(unit),
    sample,
    rank=2,
    means=(0.0, 1.0),
    # A path through it rounds about twice as often: a matmul, a product with the scale, a norm, a matmul back.
    c=8.0,
    c_gradient=8.0,
)
