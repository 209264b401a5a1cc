"""What may stand before and behind a norm of rows: a residual, an adaptive scale and shift, an activation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normswap.activation import CODES, NONE, Activation
from normswap.ops.dispatch import dense, native_serves

ROUNDED_FIRST = ("none", "relu", "clamp")
"""The activations that have the same bits of a rounded input as their rounded output has."""


class Options(NamedTuple):
    """The options of a call of ``layer_norm`` or ``rms_norm``, in the order of the native ops' arguments."""

    residual: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: Activation = NONE

    def arguments(self) -> tuple[Any, ...]:
        """For the native ops."""
        return *self[:3], self.activation.code, self.activation.low, self.activation.high

    def keywords(self) -> dict[str, Any]:
        """For the functions of ``ops`` and ``reference``."""
        return self._asdict()

    def check(self, op: str, input: Tensor, dims: int) -> None:
        """Raise ValueError where these do not go with rows of the trailing ``dims`` dims of ``input``."""
        if self.activation.name not in CODES:
            names = ", ".join(map(repr, CODES))
            raise ValueError(f"{op}: activation must be one of {names}, got {self.activation.name!r}")
        r = self.residual
        if r is not None and (r.shape, r.dtype, r.device) != (input.shape, input.dtype, input.device):
            raise ValueError(
                f"{op}: residual must have the input's shape, dtype and device, {tuple(input.shape)}, {input.dtype} "
                f"and {input.device}; got {tuple(r.shape)}, {r.dtype} and {r.device}"
            )
        if (self.scale is None) != (self.shift is None):
            raise ValueError(f"{op}: scale and shift must be given both or neither")
        for name, t in (("scale", self.scale), ("shift", self.shift)):
            if t is not None and not _is_per_sample(t, input, dims):
                raise ValueError(
                    f"{op}: {name} must have the input's rank, its last {dims} dims, its first size or 1, and 1 "
                    f"elsewhere; got {tuple(t.shape)} for an input of {tuple(input.shape)}"
                )

    def are_served(self, input: Tensor) -> bool:
        """True when the kernels take these, which ``check`` passed."""
        given = {t.dtype for t in (self.scale, self.shift) if t is not None}
        return native_serves(input, *self[:3]) and len(given) <= 1 and given <= {input.dtype, torch.float32}

    def densely(self) -> Options:
        """With tensors laid out as the kernels take them."""
        if self.scale is None or self.shift is None:
            return self._replace(residual=dense(self.residual))
        scale, shift = self.scale, self.shift
        if scale.shape != shift.shape:
            scale, shift = (t.contiguous() for t in torch.broadcast_tensors(scale, shift))
        elif scale.stride() != shift.stride() or not scale[:1].is_contiguous():
            scale, shift = scale.contiguous(), shift.contiguous()
        return Options(dense(self.residual), scale, shift, self.activation)


def _is_per_sample(t: Tensor, input: Tensor, dims: int) -> bool:
    leading = input.dim() - dims
    return (
        t.dim() == input.dim()
        and t.shape[leading:] == input.shape[leading:]
        and all(size == 1 or (i == 0 and size == input.shape[0]) for i, size in enumerate(t.shape[:leading]))
    )


def summed(input: Tensor, residual: Tensor | None, always: bool = False) -> Tensor | None:
    """The sum, laid out as PyTorch does it, where kernels do not take a tensor's layout or ``always``; else None."""
    if residual is None or (not always and input.is_contiguous() and residual.is_contiguous()):
        return None
    return input + residual


def activation_of(code: int, low: float, high: float) -> Activation:
    """The activation of what ``Options.arguments`` gives."""
    return Activation(list(CODES)[code], low, high)


def with_sum(out: Tensor, total: Tensor | None) -> Any:
    """What an op returns: ``out``, and with a residual the sum too."""
    return out if total is None else (out, total)
