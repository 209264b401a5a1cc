"""A norm under autocast that only a product reads is rounded at once: where it may be, and that nobody can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import ops
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
        self.silu = nn.SiLU()


def linear(self: Any, x: Tensor) -> Tensor:
    return self.lin(self.norm(x))


def block(self: Any, x: Tensor) -> Tensor:
    x = x + self.attn(self.norm(x))
    return x + self.mlp(self.norm2(x))


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


def read_twice(self: Any, x: Tensor) -> Tensor:
    n = self.norm(x)
    return n + self.lin(n)


def skipped(self: Any, x: Tensor) -> Tensor:
    return self.skip(self.norm(x))


def returned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    n = self.norm(x)
    return n, self.lin(n)


ROWS, IMAGES = (2, 3, 8), (2, 8, 5, 3)
FEEDING: dict[str, tuple[Forward, tuple[int, ...], list[tuple[str, ...]]]] = {
    "linear": (linear, ROWS, [("lin",)]),
    "block": (block, ROWS, [("attn",), ("mlp",)]),
    "bottleneck": (bottleneck, IMAGES, [("aa", "conv2"), ()]),
    "smooth": (smooth, IMAGES, [("conv",)]),
    "read_twice": (read_twice, ROWS, []),
    "skipped": (skipped, ROWS, []),
    "returned": (returned, ROWS, []),
}


def made(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    forward, shape, _ = FEEDING[name]
    torch.manual_seed(0)
    model = randomised(type("Written", (Parts,), {"forward": forward})()).to(device)
    return model, torch.randn(shape, device=device)


def feeds(plan: normswap.Plan) -> list[tuple[str, ...]]:
    regions = [s.match.attributes["regions"] for s in plan.swaps if s.site.name == "" and s.match.kind == "region"]
    return [Region.from_json(data).feeds for data in (regions[0] if regions else [])]


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    outputs = out if isinstance(out, tuple) else (out,)
    used = list(model.parameters())
    found = torch.autograd.grad([o.float().sin().sum() for o in outputs], [leaf, *used], allow_unused=True)
    return [*outputs, *(g for g in found if g is not None)]


@pytest.mark.case("autocast", "region")
@pytest.mark.parametrize("name", FEEDING)
def test_what_is_fed_is_found_under_autocast_alone_and_computes_the_same(name: str) -> None:
    model, x = made(name)
    assert not any(feeds(normswap.plan(model)))
    with torch.autocast("cpu", LOW):
        plan = normswap.plan(model)
        assert feeds(plan) == FEEDING[name][2]
        swapped = normswap.apply(copy.deepcopy(model), normswap.Plan.from_json(plan.to_json()))
        for ours, theirs in zip(outcome(swapped, x), outcome(model, x), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype
    for ours, theirs in zip(outcome(swapped, x), outcome(model, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype | None]:
    """What the norms are asked to give."""
    asked: list[torch.dtype | None] = []
    for name in ("layer_norm", "group_norm"):
        real = getattr(ops, name)

        def op(*given: Any, real: Any = real, **named: Any) -> Any:
            asked.append(named.get("dtype"))
            return real(*given, **named)

        monkeypatch.setattr(ops, name, op)
    return asked


def swapped_block() -> tuple[Any, Tensor]:
    model, x = made("block")
    with torch.autocast("cpu", LOW):
        return normswap.apply(model, normswap.plan(model)), x


def test_it_is_rounded_at_once_only_under_autocast(dtypes: list[torch.dtype | None]) -> None:
    swapped, x = swapped_block()
    swapped(x)
    assert dtypes == [None, None]
    for dtype in (LOW, torch.float16):
        dtypes.clear()
        with torch.autocast("cpu", dtype):
            swapped(x)
        assert dtypes == [dtype, dtype]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on what reads it": lambda m: m.attn.register_forward_pre_hook(lambda module, args: None),
    "a hook on its Linear": lambda m: m.attn.qkv.register_forward_pre_hook(lambda module, args: None),
    "another Linear": lambda m: setattr(m.attn, "qkv", Doubled(8, 24)),
    "a forward of its own": lambda m: setattr(m.attn, "forward", lambda x: x.float()),
    "another child": lambda m: setattr(m, "attn", Skip()),
}


@pytest.mark.case("region-changed-later")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_sees_float32(name: str, dtypes: list[torch.dtype | None]) -> None:
    swapped, x = swapped_block()
    CHANGES[name](swapped)
    with torch.autocast("cpu", LOW):
        swapped(x)
    assert dtypes == [None, LOW]


@pytest.mark.parametrize("name", [name for name, (_, _, found) in FEEDING.items() if any(found)])
def test_it_is_proved(name: str) -> None:
    model, x = made(name)
    with torch.autocast("cpu", LOW):
        report = normswap.report(normswap.optimize(model, x, min_speedup=None, on_mismatch="raise"))
    assert "" in report.swapped and any(feeds(report.plan))


def test_a_fault_in_what_is_rounded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.layer_norm

    def wrong(*given: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
        out = real(*given, **named)
        return out if dtype is None else (out * 1.01).to(dtype)

    model, x = made("linear")
    monkeypatch.setattr(ops, "layer_norm", wrong)
    with torch.autocast("cpu", LOW), pytest.warns(UserWarning):
        report = normswap.report(normswap.optimize(model, x, min_speedup=None))
    assert "" not in report.swapped
