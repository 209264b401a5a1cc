"""The magnitudes that a region's sums run through, for the comparison of its result and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, SIXTEEN_BITS, Magnitudes, derivative, half_ulp, rounds_further
from normswap.kinds import KINDS, NORMS, kind_of, magnitudes
from normswap.proof.product_bounds import C_LINEAR, LinearMagnitudes, folded_error
from normswap.regions.children import child_at
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, parameters_of


class Size:
    """The magnitudes that a region's sums run through: of its result, and of its gradients by role."""

    def __init__(
        self,
        compiled: Compiled,
        holder: Any,
        packed: Any,
        values: Mapping[str, Tensor],
        dtypes: list[torch.dtype],
        real: Tensor,
        rounds: tuple[bool | None, ...] = (),
        unit: float = 0.0,
    ) -> None:
        """``unit``: what ``matmul_unit`` says of the ``real`` input."""
        region = compiled.region
        given, before, _, self.scale, self.shift, arguments = compiled.unpack(packed)
        if region.ends_inside:
            values = {**values, "norm": _before_its_end(holder._modules[region.norm], values)}
        self.region, self.rounds, self.adapts = region, rounds, region.has("gain")
        x = values["convolution"] if region.convolution else given
        self.shapes = {"input": x.shape}
        if before is not None:
            x, _ = _moved(values["sum"], torch.zeros_like(values["sum"]), dtypes[0])
            self.shapes["before"] = before.shape
        self.shape = x.shape
        self.dtypes = {step.does: d for step, d in zip(region.steps, dtypes, strict=True)}
        self.rows = self._rows(holder, x, arguments, real.dtype, unit)
        self.unit = constants(region)[0] * FLOAT32_ROUNDING
        literal = region.literal_activation()
        self._activation: Any = literal or child_at(holder._modules, str(region.activation))
        size = self._back(self.rows.output)
        if self.rows.coarse is not None:
            size = size + self.rows.coarse * (self.rows.coarse_unit / FLOAT32_ROUNDING)
        if self.adapts or region.has("times"):
            self.factor = size + values["norm"].abs()
        if region.convolution:
            children = holder._modules[region.convolution], holder._modules[region.norm]
            error = folded_error(*children, given, x, dtypes[0], real)
            size = size + (error + half_ulp(values["norm"], dtypes[0])) / self.unit
        if self.adapts:
            size = size * (1 + self.scale.abs()) + 2 * values["norm"].abs() * (1 + self.scale.abs()) + self.shift.abs()
        self.output, self.slope, self.bend = self._through(size, values)

    def _rows(self, holder: Any, x: Tensor, arguments: Any, dtype: torch.dtype, unit: float) -> Magnitudes:
        region = self.region
        if region.linear:
            return LinearMagnitudes(region, holder._modules, x, self.scale).magnitudes(unit)
        if region.has("permute"):
            x = x.permute(0, 2, 3, 1)
        if not region.type and (kind := KINDS.get(region.kind)) is not None:
            return kind.magnitudes(x, dtype, *arguments[: len(kind.parameters)], *self.rounds)
        if not region.type:
            called = dict(zip(parameters_of(region), arguments, strict=True))
            more = {"_get_no_batch_dim": lambda: x.dim() - 1, "num_batches_tracked": None}
            return NORMS[region.kind].magnitudes(SimpleNamespace(**more, **called), x)
        return magnitudes(region.match, holder._modules[region.norm], x, dtype)

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor.permute(0, 3, 1, 2) if self.region.has("permute") else tensor

    def _through(self, size: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """What the error of the norm becomes behind a residual and an activation, how steep that is, and what another
        value of the norm makes of that, in roundings of float32."""
        region, unit = self.region, self.unit
        does = [step.does for step in region.steps if step.does in ("norm", "residual", "shift", "activation")]
        does += ["activation"] if region.ends_inside else []
        if region.has("times"):
            value, error = self._rounded(values["norm"], unit * size, "norm")
            factor = abs(self.shift)
            return (error / unit + value.abs()) * factor, factor, 0.0
        if does[-1] in ("norm", "shift"):
            return size, 1.0, 0.0
        last = "shift" if "shift" in does else "norm"
        value, error = self._rounded(values[last], unit * size, last)
        if "residual" in does:
            value = values["residual"]
            error = error + unit * value.abs()
            if region.convolution:
                error = error + half_ulp(value, self.dtypes["residual"])
            if does[-1] == "residual":
                return error / unit + value.abs(), 1.0, 0.0
            value, error = self._rounded(value, error, "residual")
        slope = derivative(self._activation, value)
        steepest, bend = slope.abs(), torch.zeros_like(slope)
        for side in (derivative(self._activation, value + error), derivative(self._activation, value - error)):
            steepest, bend = torch.maximum(steepest, side.abs()), torch.maximum(bend, (side - slope).abs_())
        del slope, side
        moved = error * steepest
        del error
        result = self._activation(value.clone()).abs()
        moved += rounds_further(result, moved, self.dtypes["norm" if region.ends_inside else "activation"])
        return moved.div_(unit).add_(value.abs()).add_(result), steepest.add_(1.0), bend.div_(unit)

    def _rounded(self, value: Tensor, error: Tensor, does: str) -> tuple[Tensor, Tensor]:
        return (value, error) if self.region.convolution else _moved(value, error, self.dtypes[does])

    def broadcasts(self, role: str) -> bool:
        """Whether the gradient of a role is a sum, which PyTorch computes, of gradients that are rounded before it."""
        return role in self.shapes and self.shapes[role] != self.shape

    def gradients(self, cotangents: list[Tensor], bends: bool = True) -> dict[str, Tensor]:
        """Sums of |terms| by role ("input", "before", ...) and by the names of parameters. ``bends``: with what is in
        roundings of float32 whatever else rounds."""
        dy, of_sum = cotangents[-1].abs(), cotangents[0].abs() if self.region.shared else 0.0
        behind = dy * (self.slope + self.bend if bends else self.slope)
        found: dict[str, Tensor] = {"behind": behind}
        inner = behind
        if self.region.has("times") and isinstance(self.shift, Tensor):
            found["shift"] = (dy * self.factor).sum_to_size(self.shift.shape)
        if self.adapts:
            found["scale"] = (behind * self.factor).sum_to_size(self.scale.shape)
            found["shift"] = behind.sum_to_size(self.shift.shape)
            inner = behind * (1 + self.scale.abs()) * 2
        rows = self.rows.gradients(inner.permute(0, 2, 3, 1) if self.region.has("permute") else inner)
        of_input = self._back(rows.pop("input")) + of_sum
        found |= {role: of_input.sum_to_size(shape) for role, shape in self.shapes.items()}
        if self.region.linear:
            return found | rows
        if not self.region.type:
            order = {name: f"argument {i}" for i, name in enumerate(parameters_of(self.region))}
            return found | {order[name]: tensor for name, tensor in rows.items()}
        return found | {f"{self.region.norm}.{name}": tensor for name, tensor in rows.items()}


def constants(region: Region) -> tuple[float, float]:
    """What an error of the result, and of a gradient, may be in units of 2^-24 times the magnitude."""
    kind = kind_of(region.match)
    return (C_LINEAR, C_LINEAR) if region.linear else (kind.c, kind.c_gradient)


def _before_its_end(norm: Any, values: Mapping[str, Tensor]) -> Tensor:
    """What a norm in eval that ends in an activation computes before that."""
    given = values["convolution"]
    return F.batch_norm(given, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


def _moved(value: Tensor, error: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A value as rounded to a 16-bit dtype, and how far that may lie off: not at all, but where float32 arithmetic
    cannot tell to which side it rounds, and no farther than finite numbers go. Both as they are in a wider one."""
    if dtype not in SIXTEEN_BITS:
        return value, error
    most = torch.finfo(dtype).max
    low, high = (v.clamp(-most, most).to(dtype).double() for v in (value - error, value + error))
    middle = value.to(dtype).double()
    return middle, torch.maximum(high - middle, middle - low)
