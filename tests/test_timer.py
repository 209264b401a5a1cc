"""The clock: in turn, medians, microseconds."""

from __future__ import annotations

import pytest
import torch

from normswap import timer

CPU = torch.device("cpu")


def test_functions_take_turns_and_medians_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, done = [0.0], []
    monkeypatch.setattr(timer.time, "perf_counter", lambda: now[0])

    def lasting(name: str, *seconds: float):
        left = iter(seconds)

        def function() -> None:
            done.append(name)
            now[0] += next(left)

        return function

    found = timer.medians_us([lasting("a", 1, 5, 2, 2, 9, 9), lasting("b", *[1] * 6)], CPU, rounds=3, calls=2)
    assert found == pytest.approx([3e6, 1e6])
    assert "".join(done) == "aabb" * 3


def test_between_two_marks() -> None:
    start = timer.mark(CPU)
    assert 0 <= timer.between_us(start, timer.mark(CPU)) < 1e6
    assert timer.between_us(1.0, 1.5) == 5e5
