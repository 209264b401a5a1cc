"""Which attributes of a module can be read and trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap import attributes
from normswap.plans import Reason


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
        self.none = None
        self.register_buffer("missing", None)
        self.register_buffer("shadowed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain

    @property
    def answer(self) -> int:
        return 42


class OwnGetattr(Block):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("plain", Reason.UNSUPPORTED), ("none", Reason.UNSUPPORTED), ("missing", Reason.UNSUPPORTED)),
        *(("answer", Reason.UNSUPPORTED), ("training", Reason.UNSUPPORTED), ("nowhere", Reason.UNSUPPORTED)),
        *(("shadowed", Reason.UNSUPPORTED), ("nested", Reason.CHILD)),
    ],
)
def test_only_registered_tensors_and_leaves_can_be_read(name: str, reason: Reason) -> None:
    module = Peeks()
    module.__dict__["shadowed"] = 3
    rejection = attributes.unreadable(module, (name,))
    assert rejection is not None and rejection.reason is reason and f"self.{name}" in rejection.detail


def test_a_getattr_of_its_own_makes_a_module_unreadable() -> None:
    rejection = attributes.unreadable(OwnGetattr(), ("scale",))
    assert rejection is not None and "__getattr__" in rejection.detail
    assert attributes.unreadable(Block(), ("scale", "gemm", "bn")) is None


def test_where_nothing_is_read_how_it_is_looked_up_is_all_the_same() -> None:
    own = type("Own", (nn.Linear,), {"__getattr__": lambda self, name: nn.Module.__getattr__(self, name)})(2, 2)
    assert attributes.unreadable(own, ()) is None
    assert attributes.unreadable(own, ("weight",)) is not None
