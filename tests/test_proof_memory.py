"""The proof of a large site holds less than 512 MB beyond the twin's output, on slices whose share it tells."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import compared
from memory import Meter
from models import L1, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.plans import Match
from normswap.proof import pieces
from normswap.regions.helper import Fused
from normswap.regions.sequential import by_itself

LARGE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(4096), (3, 1024, 4096)),
    "rms_norm": (lambda: nn.RMSNorm(4096), (3072, 4096)),
    "group_norm": (lambda: nn.GroupNorm(8, 32), (3, 32, 256, 512)),
    "batch_norm": (lambda: nn.BatchNorm1d(256), (49152, 256)),
    "l1_norm": (L1, (3072, 4096)),
    "linear_scale_batch_norm": (lambda: Projection(64, 256), (49152, 64)),
}
kinds = pytest.mark.parametrize("kind", LARGE)


@pytest.fixture
def two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICES", 2)


def test_the_meter() -> None:
    with Meter() as meter:
        a = torch.zeros(1000)
        b = (a + 1).view(10, 100)[2:]
        del a
        c = b * 2
    assert (meter.peak, meter.held) == (4000 + 4000, 4000 + c.numel() * 4)


@kinds
def test_held_at_most(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICES", 1)
    make, shape = LARGE[kind]
    module, x = randomised(make()).train(), torch.randn(shape)
    swap, *_ = normswap.plan(module).swaps
    with Meter() as meter:
        found = compared(swap.match, module, x, True)
    assert not found.problem and found.gradients, found
    output = module(x).nbytes
    assert meter.peak <= output + 512e6, f"{meter.peak / 1e6:.0f} MB"
    assert 0.1 < found.coverage < 0.25, found.coverage


@pytest.mark.usefixtures("two_slices")
@pytest.mark.parametrize("kind", ("layer_norm", "group_norm"))
def test_a_wrong_value_in_the_last_slice_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is run on the whole input, as in the model, and what is cut out of its output is what belongs there."""
    make, shape = LARGE[kind]
    original = type(make())
    _, swapped = modules._MODULE_CLASSES[original]

    class Wrong(swapped):  # type: ignore[misc, valid-type]
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input).clone()
            if input.shape == shape:
                out.view(-1)[-1] += 0.01
            return out

    monkeypatch.setitem(modules._MODULE_CLASSES, original, (kind, Wrong))
    found = compared(Match(kind), randomised(make()), torch.randn(shape), True)
    assert "output: error is" in found.problem


def test_slices_are_the_first_the_last_and_some_between() -> None:
    for size in (1, 2, 7, 100, 1000):
        for width in {1, min(3, size), size}:
            for most in (1, 2, 5, 10**6):
                starts = pieces.spread(size, width, most)
                assert starts[0] == 0 and len(starts) == len(set(starts)) <= max(1, most)
                assert all(0 <= start <= size - width for start in starts)
                assert most == 1 or starts[-1] == size - width
                assert most < 10**6 or {i for s in starts for i in range(s, s + width)} == set(range(size))


def test_small_inputs_are_compared_whole() -> None:
    for kind, (make, shape) in LARGE.items():
        if kind == "linear_scale_batch_norm":
            continue  # a region
        x = torch.randn((1, *shape[1:])[:2] + (8, 8) if kind == "group_norm" else (1, *shape[1:])[-2:])[:4]
        match = Match(kind, {"dim": 1} if kind == "l1_norm" else {})
        found = pieces.pieces_of(*by_itself(make(), match), x, 16)
        assert len(found.pieces) == 1 and found.coverage == 1.0 and found.pieces[0].cut(x) is x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.norm(x) + y)


@pytest.mark.parametrize("elements", [40, 400], ids=["groups", "samples"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_region_runs_on_all_of_a_large_input(is_wrong: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut out of its output is what the statements make of the samples, or the groups, that are cut out."""
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", elements)
    monkeypatch.setattr(pieces, "SLICES", 4)
    x, y = torch.randn(2, 6, 8, 5, 4).unbind()
    fused = Fused.__call__

    def called(self: Fused, children: Any, packed: Any) -> Any:
        out = fused(self, children, packed)
        if is_wrong and out.shape == x.shape:
            out.view(-1)[-1] += 0.1
        return out

    monkeypatch.setattr(Fused, "__call__", called)
    with pytest.warns(UserWarning, match="do not match") if is_wrong else contextlib.nullcontext():
        swapped = normswap.optimize(randomised(Block()), (x, y), min_speedup=None, validate="forward")
    row = next(row for row in normswap.report(swapped).rows if row["kind"] == "region")
    assert row["status"] == ("failed" if is_wrong else "wiring"), row
    assert is_wrong or row["coverage"] == pytest.approx(1 / 6 if elements == 40 else 1.0)


class Placed(nn.Module):
    """A summand of lower rank, which broadcasts along the longest dim."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Parameter(torch.randn(16, 8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.places)


@pytest.mark.parametrize("elements", [30, 100])
def test_what_broadcasts_is_cut_as_it_broadcasts(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", elements)
    swapped = normswap.optimize(randomised(Placed()), torch.randn(4, 16, 8), min_speedup=None, on_mismatch="raise")
    row = next(row for row in normswap.report(swapped).rows if row["kind"] == "region")
    assert row["status"] == "wiring" and 0.0 < row["coverage"] <= 1.0
