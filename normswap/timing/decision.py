"""The decision: candidates timed, a cover chosen, and the model with it timed against the original.

The result is never slower than the original: where it is, what gains on the device alone is tried, then nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from normswap import native
from normswap.sites import preserved
from normswap.timing import model as whole_model
from normswap.timing.candidate import Candidate, Use, with_backward
from normswap.timing.choose import Timed, Waiting, cover
from normswap.timing.clock import Gpus, Machine
from normswap.timing.hidden import Cost, costs
from normswap.timing.model import Arrangement

_PATIENCE_S = 1.0
_UNTIMED = "not timed: out of memory"


@dataclass(frozen=True)
class ModelTime:
    """Milliseconds of one run on the example inputs, by the wall's clock, before and after, and what the run waits for
    ("device" or "host"): the longer one of what it costs the device and the host."""

    before_ms: float
    after_ms: float
    bound: str
    device_ms: float
    host_ms: float
    training: bool


@dataclass(frozen=True)
class Decision:
    """``kept``: the names of the candidates to keep; ``rows``: by name what was found, of those that were timed;
    ``put_back``: by name why, of the others. ``model`` is None where nothing could be timed."""

    kept: frozenset[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    put_back: Mapping[str, str] = field(default_factory=dict)
    model: ModelTime | None = None


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


def decide(
    model: nn.Module,
    found: Sequence[Candidate],
    run: Callable[[], object],
    arranged: Arrangement,
    least: float,
    *,
    gradients: bool,
) -> Decision:
    """Time the candidates ``found`` in ``model`` and the model itself; ``run`` is one run of it, ``arranged`` swaps any
    of them for a block, ``least`` is the gain that one must have. The model is left as it was."""
    found = [replace(one, uses=tuple(use for use in one.uses if machine_for([use.device]))) for one in found]
    machine = machine_for(sorted({use.device for one in found for use in one.uses}, key=str))
    if machine is None:
        return Decision(frozenset(one.name for one in found))
    try:
        with preserved(model):
            with arranged(()):
                waits = whole_model.waiting(machine, run)
            timed = time_candidates(found)
            chosen = cover(timed, waits, least)
            kept, before_us, after_us = _never_slower(machine, run, arranged, timed, chosen, least)
    except torch.OutOfMemoryError:
        return untimed([one.name for one in found])
    rows = {one.candidate.name: _row(one, waits) for one in timed if one.calls or one.note}
    names = frozenset(one.name for one in found)
    why = {name: _why(waits, together=name in chosen) for name in sorted(names - kept)}
    told = ModelTime(
        before_us / 1e3, after_us / 1e3, waits.bound, waits.device_us / 1e3, waits.host_us / 1e3, gradients
    )
    return Decision(kept, rows, why, told)


def untimed(names: Sequence[str]) -> Decision:
    """What is left to decide where the memory does not suffice: all is kept, and the rows say so."""
    row = _row(Timed(Candidate("", ""), note=_UNTIMED), Waiting(0.0, 0.0))
    return Decision(frozenset(names), dict.fromkeys(names, row))


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar that leaves no thread behind."""

    monitor_interval = 0


def time_candidates(found: Sequence[Candidate]) -> list[Timed]:
    """The cost of every candidate in one run of the model; uses with the same key are timed once."""
    known: dict[Hashable, tuple[Cost, Cost] | str] = {}
    different = {use.key: use for candidate in found for use in candidate.uses}
    for key, use in _Bar(
        different.items(), "normswap: timing", leave=False, file=sys.stderr, disable=None, delay=_PATIENCE_S
    ):
        known[key] = _time_use(use)
    return [_summed(candidate, known) for candidate in found]


def _time_use(use: Use) -> tuple[Cost, Cost] | str:
    machine = machine_for([use.device])
    assert machine is not None
    try:
        with use.functions() as functions:
            original, ours = costs(machine, functions)
    except torch.OutOfMemoryError:
        return _UNTIMED
    return original, ours


def _summed(candidate: Candidate, known: Mapping[Hashable, tuple[Cost, Cost] | str]) -> Timed:
    total = Timed(candidate)
    for use in candidate.uses:
        cost = known[use.key]
        if isinstance(cost, str):
            return Timed(candidate, note=cost)
        original, ours = (one * use.calls for one in cost)
        total = replace(
            total, calls=total.calls + use.calls, original=total.original + original, ours=total.ours + ours
        )
    return total


def _never_slower(
    machine: Machine,
    run: Callable[[], object],
    arranged: Arrangement,
    timed: Sequence[Timed],
    kept: frozenset[str],
    least: float,
) -> tuple[frozenset[str], float, float]:
    """``kept``, or what gains on the device alone, or nothing: the first that is not slower than the original; with the
    microseconds of a run before and after."""
    gainers = kept & {one.candidate.name for one in timed if one.gains_on_device}
    before_us = 0.0
    for names in dict.fromkeys((kept, gainers)):
        if names:
            found = whole_model.compare(
                machine, [(partial(arranged, swapped), run) for swapped in (frozenset(), names)]
            )
            before_us = found.us[0]
            if not found.slower(1, 1.0 / min(1.0, least)):
                return names, before_us, found.us[1]
    before_us = before_us or whole_model.compare(machine, [(partial(arranged, frozenset()), run)]).us[0]
    return frozenset(), before_us, before_us


def _row(timed: Timed, waits: Waiting) -> dict[str, Any]:
    calls = max(1, timed.calls)
    return {
        "calls": timed.calls,
        "eager_device_us": timed.original.device_us / calls,
        "ours_device_us": timed.ours.device_us / calls,
        "eager_host_us": timed.original.host_us / calls,
        "ours_host_us": timed.ours.host_us / calls,
        "gain": timed.gain(waits),
        "bound": waits.bound,
        "note": timed.note,
    }


def _why(waits: Waiting, together: bool) -> str:
    """Without figures: equal runs give equal plans."""
    return "the model is slower with it" if together else f"the model waits for its {waits.bound}"
