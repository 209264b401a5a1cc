"""The decision: candidates timed, covers chosen, and the model with each timed against the original.

A model waits for its device or for its host, and a saving on the other side changes nothing. Where the two are close,
both count, by how close they are. What candidates gain says which covers are worth a try; the wall's clock on the
whole model says which is taken. Which of the two a model waits for is no stable fact: a busy host makes it the host. So
both views are tried, and nothing, and of what is as fast the same one is taken every time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap import native
from normswap.plans import Match, Swap
from normswap.progress import progress
from normswap.timing import model as whole_model
from normswap.timing.candidates import Candidate, Use, arrangements, candidates, kept_of, names_of, with_backward
from normswap.timing.clock import BUDGET_US, NO_COST, Budget, Cost, Gpus, Machine, OutOfTime, costs
from normswap.timing.model import Arrangement, Compared, Waiting
from normswap.untouched import preserved

ALIKE = 0.03
"""Of candidates that exclude each other and save alike up to this share, the one that names most is taken."""
DEVICE, HOST = Waiting(1.0, 0.0), Waiting(0.0, 1.0)
"""Of a model that waits for one of them alone."""


def worth(timed: Candidate, waiting: Waiting, least: float) -> bool:
    """Whether to keep a candidate: its gain is ``least`` at least. One that changes nothing but noise is kept, lest
    chance decide, unless it costs more on the other side. One that was not timed is kept."""
    gain = timed.gain(waiting)
    if gain is None:
        return True
    other_side = HOST if waiting.bound == "device" else DEVICE
    return gain >= least and (gain != 1.0 or -timed.saved_us(other_side) <= timed.noise_us(other_side))


def cover(found: Sequence[Candidate], waiting: Waiting, least: float) -> frozenset[str]:
    """The names of the candidates to keep, no two of which overlap: the one that saves most first, then the next that
    is left. What is not worth keeping hands over to what it overlaps."""
    excluded = _exclusions(found)
    left = [timed for timed in found if worth(timed, waiting, least)]
    kept: set[str] = set()
    while left:
        most = max(left, key=lambda timed: (timed.saved_us(waiting), timed.name))
        saved = most.saved_us(waiting)
        rivals = [timed for timed in left if timed.name in excluded[most.name]]
        alike = [timed for timed in rivals if timed.saved_us(waiting) >= saved - ALIKE * abs(saved)]
        taken = max(alike, key=lambda timed: (len(timed.overlaps), timed.name)).name
        kept.add(taken)
        left = [timed for timed in left if timed.name not in excluded[taken]]
    return frozenset(kept)


def in_order(found: Sequence[Candidate], waiting: Waiting, least: float, *, widest: bool) -> frozenset[str]:
    """The names of all candidates worth keeping, but for those that others exclude which name more, if the ``widest``
    go first, or fewer."""
    excluded, sign = _exclusions(found), -1 if widest else 1
    kept: set[str] = set()
    for timed in sorted(found, key=lambda timed: (sign * len(timed.overlaps), timed.name)):
        if worth(timed, waiting, least) and not excluded[timed.name] & kept:
            kept.add(timed.name)
    return frozenset(kept)


def _exclusions(found: Sequence[Candidate]) -> dict[str, set[str]]:
    """For every candidate its name and those of what it overlaps, whichever of the two says so."""
    names = {timed.name: {timed.name} for timed in found}
    for candidate in found:
        for other in candidate.overlaps & names.keys():
            names[candidate.name].add(other)
            names[other].add(candidate.name)
    return names


_UNTIMED = "not timed: out of memory or time"


@dataclass(frozen=True)
class Decision:
    """``left``: what is left of the sites of which not all is kept, None where nothing is; ``rows``: by name what was
    found, of those that were timed; ``times``: of the model, as in a report, None where it was not timed."""

    left: Mapping[str, Match | None] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    times: Mapping[str, Any] | None = None


def has_a_clock(devices: Iterable[torch.device]) -> bool:
    """Whether anything can be timed on one of them."""
    return any(machine_for([device]) is not None for device in devices)


def machine_for(devices: Sequence[torch.device]) -> Machine | None:
    """What times calls on these devices; None where our kernels do not run on all, so that there is nothing to time."""
    fits = bool(devices) and all(device.type == "cuda" for device in devices) and native.available()
    return Gpus(devices) if fits else None


def takes_gradients(model: nn.Module) -> bool:
    """Whether a run of ``model`` is to be timed with its backward: it trains, and gradients are on."""
    learns = any(p.requires_grad for p in model.parameters())
    return learns and torch.is_grad_enabled() and any(module.training for module in model.modules())


def step(model: nn.Module, run: Callable[[], Any], gradients: bool) -> Callable[[], object]:
    """One run as a user makes it: a forward, or forward and backward; no ``.grad`` is touched."""
    forward_and_backward = with_backward(run, [p for p in model.parameters() if p.requires_grad])

    def once() -> object:
        with torch.set_grad_enabled(gradients):
            return forward_and_backward() if gradients else run()

    return once


def decide_sites(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], least: float) -> Decision:
    """Which of the sites of ``swaps`` in the swapped ``model`` to keep, of which each candidate must gain ``least``;
    ``run`` runs it on its example inputs. In train mode, with gradients on, forward and backward are timed, else the
    forward without gradients. The model is left as it was."""
    gradients = takes_gradients(model)
    once, arranged = step(model, run, gradients), arrangements(model, swaps)
    try:
        with preserved(model):
            found = candidates(model, swaps, run, gradients=gradients)
            found = [replace(one, uses=tuple(use for use in one.uses if machine_for([use.device]))) for one in found]
            machine = machine_for(sorted({use.device for one in found for use in one.uses}, key=str))
            if machine is None:
                return Decision()
            budget = Budget(machine, BUDGET_US)
            once = budget.limited(once)
            with arranged(()):
                waits = whole_model.waiting(machine, once)
            timed = {one.name: one for one in time_candidates(found, Budget(machine, budget.left_us / 2))}
            least_us = whole_model.LEAST_RUNS * max(waits.device_us, waits.host_us)
            tried = _covers([*timed.values()], waits, least)[: max(1, int(budget.left_us / least_us) - 1)]
            kept, before_us, after_us = _fastest(budget, once, arranged, tried, least)
    except (torch.OutOfMemoryError, OutOfTime):
        untimed = Candidate("", note=_UNTIMED)
        return Decision(rows={swap.site.name: row([untimed], Waiting(0.0, 0.0)) for swap in swaps})
    matches = {swap.site.name: kept_of(swap, kept) for swap in swaps}
    return Decision(
        {swap.site.name: matches[swap.site.name] for swap in swaps if matches[swap.site.name] != swap.match},
        _rows(swaps, timed, kept, waits),
        {
            "before_ms": before_us / 1e3,
            "after_ms": after_us / 1e3,
            "bound": waits.bound,
            "device_ms": waits.device_us / 1e3,
            "host_ms": waits.host_us / 1e3,
            "training": gradients,
        },
    )


def time_candidates(found: Sequence[Candidate], budget: Budget) -> list[Candidate]:
    """The cost of every candidate in one run of the model; uses with the same key are timed once."""
    known: dict[Hashable, list[Cost]] = {}
    different = {use.key: use for candidate in found for use in candidate.uses}
    for key, use in progress("timing", different.items(), "calls"):
        with contextlib.suppress(torch.OutOfMemoryError, OutOfTime):
            known[key] = time_use(use, budget)
    return [_summed(candidate, known) for candidate in found]


def time_use(use: Use, budget: Budget) -> list[Cost]:
    """What a call costs, of each code in it."""
    machine = machine_for([use.device])
    assert machine is not None
    with use.functions() as functions:
        return costs(machine, [budget.limited(function) for function in functions])


def _summed(candidate: Candidate, known: Mapping[Hashable, Sequence[Cost]]) -> Candidate:
    original = ours = NO_COST
    for use in candidate.uses:
        if use.key not in known:
            return replace(candidate, note=_UNTIMED)
        before, after = known[use.key]
        original, ours = original + before * use.calls, ours + after * use.calls
    return replace(candidate, calls=sum(use.calls for use in candidate.uses), original=original, ours=ours)


def _covers(timed: Sequence[Candidate], waits: Waiting, least: float) -> list[frozenset[str]]:
    """What is worth a try, what is preferred first: the widest that gains on the device, as alone it is timed on the
    layouts that its neighbours make before they are swapped; what serves the device most, whose times are steady, and
    of that only what gains there; the narrowest, should regions lose in the model what they gain by themselves; what
    serves the host, unless that has little to do. Where candidates must gain more, or may lose, that is asked where the
    model waits."""
    gainers = {one.name for one in timed if one.saved_us(DEVICE) > one.noise_us(DEVICE)}
    view = DEVICE if least == 1.0 else waits
    first = cover(timed, view, least)
    tried = [first, first & gainers]
    if least == 1.0:
        widest, narrowest = (in_order(timed, DEVICE, least, widest=wide) for wide in (True, False))
        tried = [widest, *tried, narrowest]
        tried += [cover(timed, HOST, least)] if waits.device_share < 1.0 else []
    return [names for names in dict.fromkeys(tried) if names]


def _fastest(
    budget: Budget,
    run: Callable[[], object],
    arranged: Arrangement,
    covers: Sequence[frozenset[str]],
    least: float,
) -> tuple[frozenset[str], float, float]:
    """The first of ``covers`` that is as fast as the fastest of them and of the original, or as ``least`` allows, else
    nothing; with the microseconds of a run before and after. Where nothing is, though candidates gained by themselves,
    all are timed again, if there is time, and the time in which the original was faster is believed: that was disturbed
    less."""
    machine = budget.machine
    running = (names for names in covers if whole_model.runs((partial(arranged, names), run), "a choice of sites"))
    ways = [frozenset[str](), *running]
    timed = [(partial(arranged, names), run) for names in ways]

    def first_of(found: Compared) -> int:
        return next((i for i in range(1, len(ways)) if not found.slower(i, 1.0 / min(1.0, least))), 0)

    left_us = budget.left_us
    found = whole_model.compare(machine, timed)
    if len(ways) > 1 and not first_of(found) and left_us < 2 * budget.left_us:
        found = min(found, whole_model.compare(machine, timed), key=lambda one: one.us[0])
    taken = first_of(found)
    return ways[taken], found.us[0], found.us[taken]


def _rows(
    swaps: Sequence[Swap], timed: Mapping[str, Candidate], kept: Collection[str], waits: Waiting
) -> dict[str, dict[str, Any]]:
    """What was timed of each site: of its candidates that are ``kept``, where some are."""
    rows = {}
    for swap in swaps:
        names = [name for name in names_of(swap) if timed[name].calls or timed[name].note]
        taken = [name for name in names if name in kept] or names
        if names:
            told = f"{len(taken)} of {len(names_of(swap))} regions are kept" if len(taken) < len(names_of(swap)) else ""
            rows[swap.site.name] = row([timed[name] for name in taken], waits, told)
    return rows


def row(found: Sequence[Candidate], waits: Waiting, note: str = "") -> dict[str, Any]:
    """The candidates of one site as a row of a report: microseconds are means of their calls."""
    original = sum((one.original for one in found), NO_COST)
    ours = sum((one.ours for one in found), NO_COST)
    timed = Candidate("", calls=sum(one.calls for one in found), original=original, ours=ours)
    calls = max(1, timed.calls)
    return {
        "calls": timed.calls,
        "eager_device_us": original.device_us / calls,
        "ours_device_us": ours.device_us / calls,
        "eager_host_us": original.host_us / calls,
        "ours_host_us": ours.host_us / calls,
        "gain": timed.gain(waits),
        "bound": waits.bound,
        "note": note or next((one.note for one in found if one.note), ""),
    }
