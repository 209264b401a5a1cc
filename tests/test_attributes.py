"""Which attributes of a module can be read and trusted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normswap import attributes


class Block(nn.Module):
    """bn(gemm(x) * scale), with everything random."""

    def __init__(self, features: int = 6, channels: int = 4, **batch_norm: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(features, channels)
        self.scale = nn.Parameter(torch.randn(channels))
        self.bn = nn.BatchNorm1d(channels, **batch_norm)
        self.unread = nn.Parameter(torch.randn(3))
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm(x) * self.scale
        return self.bn(y)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(3)
        self.nested = nn.Sequential(nn.Linear(6, 6))
        self.register_buffer("shadowed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain

    @property
    def answer(self) -> int:
        return 42


class OwnGetattr(Block):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def test_what_hides_a_registered_one() -> None:
    module = Peeks()
    module.__dict__["shadowed"] = 3
    hidden = {name: attributes.is_hidden(module, name) for name in ("plain", "answer", "shadowed", "nested", "nowhere")}
    assert hidden == {"plain": True, "answer": True, "shadowed": True, "nested": False, "nowhere": False}
    assert not attributes.is_hidden(Block(), "scale")


def test_a_getattr_of_its_own_is_not_trusted() -> None:
    rejection = attributes.own_getattr(OwnGetattr())
    assert rejection is not None and "__getattr__" in rejection.detail
    assert attributes.own_getattr(Block()) is None
