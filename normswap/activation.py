"""What may follow a norm in one op: an activation with its parameters, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """An activation by name; ``low`` and ``high`` are what it is parametrised by: the slope of "leaky_relu" (``low``)
    and the bounds of "clamp" (relu6 is ``Activation("clamp", 0.0, 6.0)``), 0 for the others."""

    name: str = "none"
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, code: int, low: float, high: float) -> Activation:
        """The one that the kernels know by this number."""
        return cls([*CODES][code], low, high)

    @property
    def code(self) -> int:
        """The kernels' number for it."""
        return CODES[self.name]

    def __call__(self, x: Tensor) -> Tensor:
        """PyTorch's own of ``x``, not in place."""
        if self.name == "leaky_relu":
            return F.leaky_relu(x, self.low)
        if self.name == "clamp":
            return F.hardtanh(x, self.low, self.high)  # without a gradient at the bounds, which torch.clamp has there
        return FUNCTIONS[self.name](x)


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "clamp": F.hardtanh,
    "hardswish": F.hardswish,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
}
"""Every activation, in the order of the kernels' numbers for it, with PyTorch's default parameters."""

CODES: Mapping[str, int] = {name: code for code, name in enumerate(FUNCTIONS)}
NONE = Activation()
ROUNDED_FIRST = ("none", "relu", "clamp")
"""The activations that have the same bits of a rounded input as their rounded output has."""
