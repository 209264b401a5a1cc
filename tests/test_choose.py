"""The cover: what is kept of candidates with given costs, where a model waits for its device, its host or both."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from normswap.timing import decision
from normswap.timing.candidates import Candidate
from normswap.timing.clock import Cost
from normswap.timing.decision import cover, worth
from normswap.timing.model import Waiting

DEVICE, HOST, BOTH = Waiting(900.0, 300.0), Waiting(300.0, 900.0), Waiting(500.0, 500.0)


def timed(
    name: str, device: tuple[float, float], host: tuple[float, float] = (10.0, 10.0), overlaps: Iterable[str] = ()
) -> Candidate:
    """A candidate of one call with (PyTorch's, our) microseconds."""
    costs = (Cost(d, h) for d, h in zip(device, host, strict=True))
    return Candidate(name, (), frozenset(overlaps), 1, *costs)


def test_what_a_model_waits_for() -> None:
    assert (DEVICE.bound, HOST.bound, BOTH.bound) == ("device", "host", "device")
    assert (DEVICE.device_share, HOST.device_share, BOTH.device_share) == (1.0, 0.0, 0.5)
    assert Waiting(105.0, 100.0).device_share == pytest.approx(0.75)
    assert Waiting(95.0, 100.0).device_share == pytest.approx(0.25)
    assert Waiting(1.0, 0.0).device_share == 1.0


def test_only_gains_where_the_model_waits_count() -> None:
    faster_there = timed("a", (100.0, 50.0), (10.0, 20.0))
    slower_there = timed("a", (100.0, 150.0), (20.0, 10.0))
    assert [worth(faster_there, w, 1.0) for w in (DEVICE, HOST)] == [True, False]
    assert [worth(slower_there, w, 1.0) for w in (DEVICE, HOST)] == [False, True]
    assert [faster_there.gain(w) for w in (DEVICE, HOST)] == [2.0, 0.5]
    assert faster_there.gain(BOTH) == pytest.approx(110.0 / 70.0)


@pytest.mark.parametrize("waiting", [DEVICE, HOST, BOTH])
def test_a_gain_of_exactly_one_is_kept_and_asked_for_exactly_is_enough(waiting: Waiting) -> None:
    assert worth(timed("a", (100.0, 100.0)), waiting, 1.0)
    twice = timed("a", (100.0, 50.0), (10.0, 5.0))
    assert worth(twice, waiting, 2.0) and not worth(twice, waiting, 2.0001)
    assert not worth(timed("a", (100.0, 100.0)), waiting, 1.0001)


def test_a_difference_within_the_noise_is_none_and_keeps_what_costs_nothing_elsewhere() -> None:
    for ours in (99.0, 99.2, 100.0, 100.8):
        assert timed("a", (100.0, ours)).gain(DEVICE) == 1.0
        assert worth(timed("a", (100.0, ours)), DEVICE, 1.0)
        assert not worth(timed("a", (100.0, ours), (10.0, 12.0)), DEVICE, 1.0)
    assert worth(timed("a", (100.0, 100.0), (10.0, 10.5)), DEVICE, 1.0)
    assert timed("a", (100.0, 0.0)).gain(DEVICE) == 1.0  # what takes no time was not measured
    for ours in (9.6, 10.0, 10.4):
        assert timed("a", (100.0, 50.0), (10.0, ours)).gain(HOST) == 1.0
        assert worth(timed("a", (100.0, 50.0), (10.0, ours)), HOST, 1.0)
        assert not worth(timed("a", (100.0, 110.0), (10.0, ours)), HOST, 1.0)


def test_measured_noise_widens_it() -> None:
    quiet, noisy = Cost(105.0, 10.0), Cost(105.0, 10.0, device_noise_us=8.0)
    original = Cost(100.0, 10.0)
    assert not worth(Candidate("a", (), frozenset(), 1, original, quiet), DEVICE, 1.0)
    assert worth(Candidate("a", (), frozenset(), 1, original, noisy), DEVICE, 1.0)


def test_what_was_not_timed_is_kept() -> None:
    assert Candidate("a").gain(DEVICE) is None
    assert cover([Candidate("a")], DEVICE, 5.0) == {"a"}


@pytest.mark.parametrize("told_by_the_larger", [True, False])
def test_what_saves_most_excludes_what_it_overlaps(told_by_the_larger: bool) -> None:
    fused = timed("fused", (100.0, 30.0), overlaps=["norm"] if told_by_the_larger else [])
    alone = timed("norm", (60.0, 30.0), overlaps=[] if told_by_the_larger else ["fused"])
    other = timed("other", (10.0, 5.0))
    assert cover([alone, fused, other], DEVICE, 1.0) == {"fused", "other"}


def test_what_loses_hands_over_to_the_next_that_overlaps_it() -> None:
    slow = timed("fused", (100.0, 120.0), overlaps=["norm", "add"])
    slower = timed("add", (50.0, 60.0), overlaps=["norm"])
    assert cover([slow, slower, timed("norm", (60.0, 30.0))], DEVICE, 1.0) == {"norm"}
    assert cover([slow, slower, timed("norm", (60.0, 70.0))], DEVICE, 1.0) == frozenset()


def test_the_one_between_two_gives_way_to_the_better_first() -> None:
    left, right = timed("left", (50.0, 20.0), overlaps=["middle"]), timed("right", (50.0, 30.0), overlaps=["middle"])
    assert cover([left, timed("middle", (50.0, 10.0)), right], DEVICE, 1.0) == {"middle"}
    assert cover([left, timed("middle", (50.0, 25.0)), right], DEVICE, 1.0) == {"left", "right"}


@pytest.mark.parametrize("saved", [69.0, 70.0, 71.0])
def test_of_two_that_save_alike_the_one_around_the_other_is_taken(saved: float) -> None:
    """Whichever of them the noise favours."""
    fused = timed("fused", (100.0, 100.0 - saved), overlaps=["norm"])
    assert cover([timed("norm", (80.0, 10.0)), fused], DEVICE, 1.0) == {"fused"}


def test_what_saves_alike_is_taken_of_what_overlaps_alone() -> None:
    inside, around = timed("inside", (198.0, 100.0)), timed("around", (196.0, 100.0), overlaps=["inside"])
    assert cover([timed("another", (200.0, 100.0)), inside, around], DEVICE, 1.0) == {"another", "around"}


def test_the_widest_is_preferred_where_the_whole_model_is_as_fast() -> None:
    """By itself it may be timed on a residual of another layout than its neighbours give it once they are swapped."""
    fused, norm = timed("fused", (300.0, 150.0), overlaps=["norm"]), timed("norm", (250.0, 60.0))
    assert decision._covers([fused, norm], DEVICE, 1.0) == [{"fused"}, {"norm"}]
    assert decision._covers([fused, norm], DEVICE, 1.5) == [{"norm"}]
    assert decision._covers([norm], HOST, 1.5) == []


def test_the_narrowest_is_tried_too() -> None:
    """What a region saves by itself may be lost in the model, where its norm alone gains."""
    fused, norm = timed("fused", (100.0, 30.0), overlaps=["norm"]), timed("norm", (60.0, 30.0))
    assert decision._covers([fused, norm], DEVICE, 1.0) == [{"fused"}, {"norm"}]
    slow = timed("norm", (60.0, 70.0))
    assert decision._covers([fused, slow], DEVICE, 1.0) == [{"fused"}]
    assert decision._covers([slow], DEVICE, 1.0) == []


def test_calls_weigh() -> None:
    once, often = Cost(100.0, 10.0), Cost(4.0, 10.0)
    rare = Candidate("rare", (), frozenset(["often"]), 1, once, once * 0.5)
    frequent = Candidate("often", (), frozenset(), 100, often * 100, often * 50)
    assert cover([rare, frequent], DEVICE, 1.0) == {"often"}
