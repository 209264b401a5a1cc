"""Models under autocast whose norms only a product reads, and such as look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap
from normswap.regions.spec import Region

LOW = torch.bfloat16
Forward = Callable[..., Any]


class Attention(nn.Module):
    """As timm's: the argument's name is bound anew in branches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Gated(Attention):
    """As timm's later ones: an optional part is None, unless it is there."""

    def __init__(self, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        x = self.proj(self.qkv(x).chunk(3, -1)[0])
        return x if gate is None else x * gate


class Elsewhere(Attention):
    """What is not among its children it looks up itself."""

    def __getattr__(self, name: str) -> Any:
        return torch.tanh if name == "gate" else super().__getattr__(name)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.proj(self.qkv(x).chunk(3, -1)[0]) * self.gate(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = F.gelu(x)
        return self.fc2(x)


class Skip(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + x


class Precise(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            hidden = self.fc1(x)
        return self.fc2(hidden)


class PreciseLater(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        def product() -> Tensor:
            return self.fc1(x)

        with torch.autocast(x.device.type, enabled=False):
            return product()


class PreciseByHand(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        known = torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, False)
        x = self.fc1(x)
        torch.set_autocast_enabled(kind, known)
        return self.fc2(x)


class PreciseInMethods(Mlp):
    def is_on(self) -> bool:
        return torch.is_autocast_enabled("cpu")

    def narrow(self, on: bool) -> None:
        torch.set_autocast_enabled("cpu", on)

    def forward(self, x: Tensor) -> Tensor:
        known = self.is_on()
        self.narrow(False)
        x = self.fc1(x)
        self.narrow(known)
        return self.fc2(x)


class PreciseInTurn(Mlp):
    def added(self, products: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return sum(products)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.added(self.fc1(x) for _ in range(2))


class PreciseAfterwards(Mlp):
    def forward(self, x: Tensor) -> Any:
        yield self.fc1(x)


class MadeLate(Gated):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.gate is None:
            self.gate = torch.tanh
        return self.proj(self.qkv(x).chunk(3, -1)[0]) * self.gate(x)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2, self.gn, self.gn2 = (
            nn.LayerNorm(8),
            nn.LayerNorm(8),
            nn.GroupNorm(2, 8),
            nn.GroupNorm(4, 8),
        )
        self.attn, self.mlp, self.skip, self.lin = Attention(), Mlp(), Skip(), nn.Linear(8, 8)
        self.conv, self.conv2, self.act, self.aa = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(),
            nn.Identity(),
        )
        self.silu, self.up = nn.SiLU(), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.precise, self.later, self.by_hand = Precise(), PreciseLater(), PreciseByHand()
        self.plain, self.active, self.elsewhere = Gated(), Gated(nn.Tanh()), Elsewhere()
        self.in_methods, self.in_turn, self.afterwards = PreciseInMethods(), PreciseInTurn(), PreciseAfterwards()
        self.made_late = MadeLate()

    def narrow(self, on: bool) -> None:
        torch.set_autocast_enabled("cpu", on)


def linear(self: Any, x: Tensor) -> Tensor:
    return self.lin(self.norm(x))


def block(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.norm(x))
    return x + self.mlp(self.norm2(x))


def without_gate(self: Any, x: Tensor) -> Tensor:
    return self.plain(self.norm(x))


def with_another_gate(self: Any, x: Tensor) -> Tensor:
    return self.active(self.norm(x))


def with_a_gate_elsewhere(self: Any, x: Tensor) -> Tensor:
    return self.elsewhere(self.norm(x))


def bottleneck(self: Any, x: Tensor) -> Tensor:
    shortcut = x
    x = self.conv(x)
    x = self.gn(x)
    x = self.act(x)
    x = self.aa(x)
    x = self.conv2(x)
    x = self.gn2(x)
    x += shortcut
    return self.act(x)


def smooth(self: Any, x: Tensor) -> Tensor:
    return self.conv(self.silu(self.gn(x)))


def upwards(self: Any, x: Tensor) -> Tensor:
    return self.up(self.silu(self.gn(x)))


def over_channels(self: Any, x: Tensor) -> Tensor:
    x = x.to(memory_format=torch.channels_last)
    x = x.permute(0, 2, 3, 1)
    x = self.norm(x)
    return self.conv(x.permute(0, 3, 1, 2))


def read_twice(self: Any, x: Tensor) -> Tensor:
    n = self.norm(x)
    return n + self.lin(n)


def skipped(self: Any, x: Tensor) -> Tensor:
    return self.skip(self.norm(x))


def precise(self: Any, x: Tensor) -> Tensor:
    return self.precise(self.norm(x))


def precise_later(self: Any, x: Tensor) -> Tensor:
    return self.later(self.norm(x))


def precise_by_hand(self: Any, x: Tensor) -> Tensor:
    return self.by_hand(self.norm(x))


def precise_in_methods(self: Any, x: Tensor) -> Tensor:
    return self.in_methods(self.norm(x))


def precise_in_turn(self: Any, x: Tensor) -> Tensor:
    return self.in_turn(self.norm(x))


def precise_afterwards(self: Any, x: Tensor) -> Tensor:
    products = self.afterwards(self.norm(x))
    with torch.autocast("cpu", enabled=False):
        return next(products)


def with_a_gate_made_late(self: Any, x: Tensor) -> Tensor:
    self.made_late.gate = None
    return self.made_late(self.norm(x))


def precise_between(self: Any, x: Tensor) -> Tensor:
    known = torch.is_autocast_enabled("cpu")
    n = self.norm(x)
    torch.set_autocast_enabled("cpu", False)
    n = self.lin(n)
    torch.set_autocast_enabled("cpu", known)
    return n


def precise_by_a_method(self: Any, x: Tensor) -> Tensor:
    known = torch.is_autocast_enabled("cpu")
    n = self.norm(x)
    self.narrow(False)
    n = self.lin(n)
    self.narrow(known)
    return n


def hooked_between(self: Any, x: Tensor) -> Tensor:
    n = self.norm(x)
    handle = self.lin.register_forward_pre_hook(lambda module, args: (args[0].float().sin(),))
    n = self.lin(n)
    handle.remove()
    return n


def beside_others(self: Any, x: Tensor) -> Tensor:
    n = self.norm(x)
    m = self.norm2(x)
    return self.lin(n) + m


def returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    n = self.norm(x)
    return n, self.lin(n)


ROWS, IMAGES = (2, 3, 8), (2, 8, 5, 3)
FEEDING: dict[str, tuple[Forward, tuple[int, ...], list[tuple[str, ...]]]] = {
    "linear": (linear, ROWS, [("lin",)]),
    "block": (block, ROWS, [("attn",), ("mlp",)]),
    "without_gate": (without_gate, ROWS, [("plain",)]),
    "with_another_gate": (with_another_gate, ROWS, []),
    "with_a_gate_elsewhere": (with_a_gate_elsewhere, ROWS, []),
    "bottleneck": (bottleneck, IMAGES, [("aa", "conv2"), ()]),
    "smooth": (smooth, IMAGES, [("conv",)]),
    "upwards": (upwards, IMAGES, [("up",)]),
    "over_channels": (over_channels, IMAGES, [("conv",)]),
    "read_twice": (read_twice, ROWS, []),
    "skipped": (skipped, ROWS, []),
    "returned": (returned, ROWS, []),
    "precise": (precise, ROWS, []),
    "precise_later": (precise_later, ROWS, []),
    "precise_by_hand": (precise_by_hand, ROWS, []),
    "precise_in_methods": (precise_in_methods, ROWS, []),
    "precise_in_turn": (precise_in_turn, ROWS, []),
    "precise_afterwards": (precise_afterwards, ROWS, []),
    "with_a_gate_made_late": (with_a_gate_made_late, ROWS, []),
    "precise_between": (precise_between, ROWS, []),
    "precise_by_a_method": (precise_by_a_method, ROWS, []),
    "hooked_between": (hooked_between, ROWS, []),
    "beside_others": (beside_others, ROWS, [("lin",)]),
}


def made(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    forward, shape, _ = FEEDING[name]
    torch.manual_seed(0)
    model = randomised(type("Written", (Parts,), {"forward": forward})()).to(device)
    return model, torch.randn(shape, device=device)


def feeds(plan: normswap.Plan) -> list[tuple[str, ...]]:
    regions = [s.match.attributes["regions"] for s in plan.swaps if s.site.name == "" and s.match.kind == "region"]
    return [Region.from_json(data).feeds for data in (regions[0] if regions else [])]
