"""What is wrong with a tensor of ours, beside PyTorch's and the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normswap.criterion import Magnitudes
from normswap.proof import comparison as comparisons
from normswap.proof.comparison import Checks, verdict

ONES, NAN, INF = torch.ones(4), torch.nan, torch.inf
ULP = 2.0**-23
"""Of one in float32: with a magnitude of nothing the limit is half of it, and what is added."""


def of(*changes: float) -> Tensor:
    """Ones, the first of them changed."""
    return torch.tensor([*changes, *[1.0] * (4 - len(changes))])


@pytest.mark.parametrize("at_once", [2**22, 0])
@pytest.mark.parametrize(
    ("ours", "eager", "reference", "share", "problem", "note"),
    [
        (ONES, ONES, ONES, 0.0, "", ""),
        (of(1 + ULP), of(1 + ULP), ONES, 1.0, "", ""),  # at the limit
        (of(1 + 4 * ULP), ONES, ONES, 4.0, "error is 4 times", ""),
        (ONES, of(1 + 4 * ULP), ONES, 0.0, "", "own error is 4 times"),
        (of(1 + 4 * ULP), of(1 + 4 * ULP), ONES, 0.0, "", "own error is 4 times"),  # PyTorch's own, bit for bit
        (of(1 + 4 * ULP, 1 + 2 * ULP), of(1 + 4 * ULP), ONES, 2.0, "error is 2 times", "own error"),
        (of(NAN), ONES, ONES, 0.0, "NaN differs", ""),
        (of(INF), ONES, ONES, 0.0, "Inf in 1", ""),
        (ONES, of(INF), ONES, 0.0, "", "not finite in 1"),
        (of(NAN), of(NAN), of(NAN), 0.0, "", ""),
        (ONES * NAN, ONES * NAN, ONES * NAN, 0.0, "", "nowhere finite"),
        (of(NAN, 1 + 4 * ULP), of(NAN, 1 + 4 * ULP), of(NAN), 0.0, "", "own error is 4 times"),
        (ONES[:0], ONES[:0], ONES[:0], 0.0, "", ""),
    ],
)
def test_a_verdict(
    ours: Tensor,
    eager: Tensor,
    reference: Tensor,
    share: float,
    problem: str,
    note: str,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparisons, "_AT_ONCE", at_once)
    wide = reference.double()
    found = verdict("out", ours, eager, wide, torch.zeros_like(wide), 4.0, ULP / 2)
    assert found.share == pytest.approx(share)
    for told, words in ((found.problem, problem), (found.note, note)):
        assert words in told and bool(told) == bool(words) and (not told or told.startswith("out: "))


def test_pytorchs_own_error_is_told_of_beyond_the_limit() -> None:
    assert comparisons._told("out", 1.0) == "" and comparisons._told("out", 1.1).startswith("out: PyTorch's own error")


def test_each_is_judged_in_its_dtype() -> None:
    found = verdict("out", ONES + ULP, ONES.half(), ONES.double(), torch.zeros(4).double(), 4.0)
    assert (found.share, found.eager) == (2.0, 0.0) and found.problem
    near = torch.full((4,), 1.0004).double()
    found = verdict("out", near.float(), ONES.half(), near, torch.zeros(4).double(), 4.0)
    assert 0.5 < found.eager < 1.0 and not found.problem and not found.note


def test_the_worst_shares_and_what_was_said_first() -> None:
    checks, zero = Checks(4.0, 8.0), torch.zeros(4).double()
    for name, ours, eager in (("a", 4, 2), ("b", 6, 3), ("c", 0, 0)):
        checks.add(name, ONES + ours * ULP, ONES + eager * ULP, ONES.double(), zero)
    assert (checks.found.share, checks.found.eager) == (12.0, 6.0)
    assert checks.found.problem.startswith("a: ") and checks.found.note.startswith("a: ")
    for c, fails in ((None, True), (1e3, False)):
        checks = Checks(0.0, 0.0)
        checks.add("a", ONES + 4 * ULP, ONES, ONES.double(), ONES.double(), c=c)
        assert bool(checks.found.problem) == fails


@pytest.mark.parametrize("eager", [[ONES], [ONES, ONES[:1]], [ONES, ONES.half()], [ONES, ONES]])
def test_outputs_alike(eager: list[Tensor]) -> None:
    checks, alike = Checks(4.0, 8.0), len(eager) == 2 and eager[1] is ONES
    assert checks.are_alike([ONES, ONES], eager) == alike
    assert (
        bool(checks.found.problem) != alike
        and ("float32 (4), " in checks.found.problem or "float32 (4,), " in checks.found.problem) != alike
    )


def test_the_tensors_that_gradients_reach() -> None:
    checks = Checks(4.0, 8.0)
    assert checks.reach_the_same({"a": ONES}, {"a": ONES}) and not checks.found.problem
    assert not checks.reach_the_same({"a": ONES, "b": ONES}, {"c": ONES, "b": ONES})
    assert checks.found.problem.endswith(": a, c")


COUNT = torch.tensor(3)


@pytest.mark.parametrize(
    ("ours", "eager", "size", "kernel_ran", "fails"),
    [
        (COUNT, COUNT, {}, True, False),
        (COUNT + 1, COUNT, {}, True, True),
        (ONES + 2 * ULP, ONES, {}, True, False),  # of the reference's own size
        (ONES + 2 * ULP, ONES, {"output": 0.0}, True, True),
        (ONES + 2 * ULP, ONES, {"output": 0.5}, True, True),
        (ONES + 2 * ULP, ONES, {"output": 0.5}, False, False),  # PyTorch's own code rounds more
        (ONES + 2 * ULP, ONES, {"output": 0.0, "coarse": 1.0}, True, False),
        (ONES + 9 * ULP, ONES, {"output": 0.0, "coarse": 1.0}, True, True),
    ],
)
def test_buffers(ours: Tensor, eager: Tensor, size: dict[str, Any], kernel_ran: bool, fails: bool) -> None:
    def sized(name: str) -> dict[str, Tensor]:
        return {"mean": torch.full((4,), size[name]).double()} if name in size else {}

    found = Magnitudes(
        ONES, lambda dy: {}, coarse_unit=ULP / 2, buffers=sized("output"), coarse_buffers=sized("coarse")
    )
    checks = Checks(4.0, 8.0)
    checks.add_buffers({"bn.mean": ours}, {"bn.mean": eager}, {"bn.mean": ONES.double()}, found, kernel_ran, "bn.")
    assert bool(checks.found.problem) == fails and ("bn.mean" in checks.found.problem) == fails
