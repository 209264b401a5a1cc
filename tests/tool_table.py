"""The table of PyTorch's and others' tools: what its rows are, the model they are tried on, what is seen of it."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from long_way import go_the_long_way
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import ops

WORKS, IN_ORDER = "works", "works in this order"
ORIGINAL, REFUSED = "the original code runs", "refused"


@dataclass(frozen=True)
class Seen:
    """What a check saw: one of the four above, and what is said of the other order (or of all, where refused)."""

    verdict: str
    text: str = ""


Check = Callable[[str], Seen]


@dataclass(frozen=True)
class Row:
    """A tool, the calls in their order, what is declared of them, and the check that sees it on a device."""

    tool: str
    calls: str
    declared: Seen
    check: Check
    devices: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.check.__name__


ROWS: list[Row] = []


def row(
    tool: str,
    calls: str,
    verdict: str = WORKS,
    text: str = "",
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    needs: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Add the decorated check to the table. ``needs`` are libraries beside PyTorch."""

    def add(check: Check) -> Check:
        ROWS.append(Row(tool, calls, Seen(verdict, text), check, devices, needs))
        return check

    return add


def params(device: str) -> list[Any]:
    """The rows for ``device`` as parameters of a test; skipped where a library is missing."""
    return [
        pytest.param(
            one,
            id=one.name,
            marks=pytest.mark.skipif(
                any(importlib.util.find_spec(name) is None for name in one.needs), reason=f"needs {one.needs}"
            ),
        )
        for one in ROWS
        if device in one.devices
    ]


# --- the model ----------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class Block(nn.Module):
    """A norm by itself, one behind a sum, one before an activation."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.norm, self.fc, self.rms = nn.LayerNorm(size), nn.Linear(size, size), ByHand(size)
        self.group, self.out = nn.GroupNorm(2, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rms(x + self.fc(self.norm(x)))
        return self.out(F.silu(self.group(x)))


def model_on(device: str, blocks: int = 2) -> nn.Module:
    """Some blocks with random weights, in eval mode."""
    return randomised(nn.Sequential(*(Block() for _ in range(blocks)))).eval().to(device)


def x_on(device: str, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, device=device)


def optimized(model: nn.Module, x: Any, **options: Any) -> nn.Module:
    """``model`` with every site swapped, however fast that is."""
    fast = normswap.optimize(model, x, min_speedup=None, **options)
    assert normswap.report(fast).swapped
    return fast


def pair(device: str, *, train: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, the same swapped, and an input."""
    model, x = model_on(device).train(train), x_on(device)
    return model, optimized(model, x), x


# --- what is seen -------------------------------------------------------------------------------------------------


def same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def same_step(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The same outputs and the same gradients of the input."""
    cotangent, found = None, []
    for one in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = one(leaf)
        cotangent = torch.randn_like(out) if cotangent is None else cotangent
        found.append((out, *torch.autograd.grad(out, leaf, cotangent)))
    for a, b in zip(*found, strict=True):
        same(a, b)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of our ops, as they are called in the block."""
    calls: list[str] = []

    def counting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return op(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        go_the_long_way(patch)
        for name, op in list(vars(ops).items()):
            if inspect.isfunction(op) and name not in ("autograd_only", "native_serves"):
                patch.setattr(ops, name, counting(name, op))
        yield calls


def who_runs(call: Callable[[], Any]) -> str:
    """WORKS where ``call`` runs ops of ours, ORIGINAL where it runs none."""
    with counted() as calls:
        call()
    return WORKS if calls else ORIGINAL


def compared(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor) -> Seen:
    """The same outputs; by whose code."""
    same(ours(x), theirs(x))
    return Seen(who_runs(lambda: ours(x)))


def left_alone(model: nn.Module, x: Any = None) -> str:
    """What the report says of the sites, all of which optimize leaves alone, and which compute what they did."""
    expected = None if x is None else model(x)
    with pytest.warns(UserWarning, match="nothing was swapped"):
        normswap.optimize(model, x, inplace=True, min_speedup=None)
    if expected is not None:
        same(model(x), expected)
    (cure,) = {row["cure"] for row in normswap.report(model).rows}
    return f"left alone: {cure}"


def refusal(call: Callable[[], Any]) -> str:
    """The text with which ``call`` is refused."""
    with pytest.raises(normswap.NormswapError) as caught:
        call()
    return str(caught.value)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
