"""How each convolution with a norm behind it is computed: what is right on the example inputs and fastest on the device
there, and as it was where nothing is.

What a way costs the device and the host by itself is weighed in several manners; which of them serves the model, which
waits for the slower of the two, the wall's clock says. Whether it gains is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap.modules import swapped_class
from normswap.plans import Match, Plan, Swap
from normswap.proof.compare import compare_region
from normswap.regions.foldings import by_default, foldings_of, without_convolution
from normswap.regions.helper import Fused, make_helper
from normswap.regions.listening import Listener, holder_of, listening
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region
from normswap.timing.candidates import Code, Recorder, Use, looks_of
from normswap.timing.clock import BUDGET_US, NO_COST, Budget, Cost, OutOfTime
from normswap.timing.decision import machine_for, takes_gradients, time_use
from normswap.timing.model import Way, compare, runs
from normswap.untouched import classes, preserved

APART = "apart"
"""The convolution as it is, and what stands behind it as one op."""
STATEMENTS = "statements"
_MARGIN = 0.03
"""By so much, as a share, must a way be faster to be taken before one that stands earlier."""
SHARES = (0.0, 0.25, 0.5, 1.0)
"""Of the host's time in what the ways are judged by, each tried; the rest is the device's."""


def decide_foldings(model: nn.Module, plan: Plan, run: Callable[[], Any] | None, *, timed: bool) -> Plan:
    """``plan`` of the unswapped ``model``, which leaves open how convolutions are computed, with that said: by default
    without ``run``, one run of the model on a GPU; else by what is right there and, where ``timed``, fastest. A model
    that takes gradients calls its convolutions as they are. The model is left as it was."""
    owners = {s.site.name: _Owner(model.get_submodule(s.site.name), s.match) for s in plan.swaps if _convolves(s.match)}
    places = [place for owner in owners.values() for place in owner.places.values()]
    if takes_gradients(model):
        for place in places:
            place.chosen = APART
    elif places and run is not None:
        try:
            with preserved(model), torch.no_grad():
                with listening(owners.values()):
                    run()
                if timed:
                    _decide([*owners.values()], run)
        except (torch.OutOfMemoryError, OutOfTime):
            for place in places:
                place.chosen = ""
    settled = (Swap(s.site, owners[s.site.name].settled()) if s.site.name in owners else s for s in plan.swaps)
    return Plan(tuple(s for s in settled if s.match.attributes.get("regions", True)), plan.refused)


def _convolves(match: Match) -> bool:
    return any(region["convolution"] for region in match.attributes.get("regions", ()))


@dataclass
class _Place:
    """A region with a convolution, what was right of the ways to compute it, None until it is reached, what it was
    called with and what was chosen, "" for the default."""

    compiled: Compiled
    owner: nn.Module
    right: list[str] | None = None
    recorder: Recorder = field(default_factory=Recorder)
    chosen: str = ""

    def way(self, folding: str) -> Compiled:
        return replace(self.compiled, region=replace(self.compiled.region, folding=folding))

    def heard(self, packed: Any) -> None:
        """The first call also compares all ways with the statements."""
        self.recorder.add(packed)
        if self.right is None:
            self.right = [one for one in foldings_of(self.compiled.region, self.owner) if self._is_right(one, packed)]

    def _is_right(self, folding: str, packed: Any) -> bool:
        fused = Fused(self.way(folding))
        x = self.compiled.unpack(packed)[0]
        if fused.convolved is None or not fused.convolved.serves(self.owner._modules, x):
            return False
        return not compare_region(self.way(folding), fused, self.owner, packed, False, slices=1).problem

    def ways(self) -> list[str]:
        """What may be chosen, in the order of preference."""
        rest = without_convolution(self.compiled.region)
        return [*(self.right or ()), *([APART] if rest is not None else []), STATEMENTS]

    def uses(self) -> tuple[Use, ...]:
        """Every form of call, to be timed in all ways."""
        ways = self.ways()
        key = tuple(ways), looks_of(self.compiled.region, self.owner)
        return self.recorder.uses(key, lambda: [self._code(way) for way in ways], gradients=False)

    def _code(self, way: str) -> Code:
        function = self.compiled.snippet if way == STATEMENTS else make_helper(self.way(way))
        return Code(partial(function, holder_of(self.compiled.region, self.owner)))

    def costs(self, known: dict[Hashable, list[Cost]], budget: Budget) -> dict[str, Cost]:
        """Of one run of the model, in each way; ``known`` are calls that were timed, by their keys."""
        totals = dict.fromkeys(self.ways(), NO_COST)
        for use in self.uses():
            if use.key not in known:
                known[use.key] = time_use(use, budget)
            for way, cost in zip(totals, known[use.key], strict=True):
                totals[way] += cost * use.calls
        return totals

    def settled(self) -> Region | None:
        """The region as it was decided; where nothing was, the default, unless that was found to be wrong."""
        region, rest = self.compiled.region, without_convolution(self.compiled.region)
        if self.chosen == STATEMENTS:
            return None
        if self.chosen not in ("", APART):
            return replace(region, folding=self.chosen)
        default = by_default(region, self.owner)
        folding = "" if default is None else default.folding
        wrong = folding != "" and self.right is not None and folding not in self.right
        return rest if self.chosen == APART or wrong else default


class _Owner(Listener):
    """A module with regions."""

    def __init__(self, module: nn.Module, match: Match) -> None:
        super().__init__(module, type(module), match)
        self.places = {id(one): _Place(one, module) for one in self.compiled if one.region.convolution}

    def heard(self, compiled: Compiled, packed: Any) -> None:
        """Tells the place."""
        if (place := self.places.get(id(compiled))) is not None:
            place.heard(packed)

    def settled(self, alone: bool = False) -> Match:
        """What is left of the match; ``alone``: of the regions with a convolution."""
        ours = [one for one in self.compiled if not alone or id(one) in self.places]
        regions = [self.places[id(one)].settled() if id(one) in self.places else one.region for one in ours]
        kept = [region.to_json() for region in regions if region is not None]
        return Match(self.match.kind, {**self.match.attributes, "regions": kept})


def _decide(owners: Sequence[_Owner], run: Callable[[], Any]) -> None:
    """Choose for every place that was reached; calls of equal keys are timed once. Nothing is where there is no
    clock."""
    places = [place for owner in owners for place in owner.places.values() if place.right is not None]
    devices = {call.device for place in places for call in place.recorder.calls}
    machine = machine_for(sorted(devices, key=str))
    if machine is None:
        return
    known: dict[Hashable, list[Cost]] = {}
    budget = Budget(machine, BUDGET_US)
    run = budget.limited(run)
    found = [place.costs(known, budget) if place.recorder.calls else {} for place in places]
    choices = [[_chosen(totals, share) for totals in found] for share in SHARES]
    choices = [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
    if len(choices) > 1:
        ways = [_way(owners, places, choice, run) for choice in choices]
        ran = [index for index, way in enumerate(ways) if runs(way, "a way to compute the model's convolutions")]
        times = compare(machine, [ways[index] for index in ran]) if ran else None
        choices = [choices[index] for at, index in enumerate(ran) if times is not None and not times.slower(at)]
    _choose(places, choices[0] if choices else [""] * len(places))


def _choose(places: Sequence[_Place], choice: Sequence[str]) -> None:
    for place, way in zip(places, choice, strict=True):
        place.chosen = way


def _way(owners: Sequence[_Owner], places: Sequence[_Place], choice: Sequence[str], run: Callable[[], Any]) -> Way:
    """A run of the model with its convolutions computed so, and all else as it was."""
    _choose(places, choice)
    settled = [(owner.module, owner.settled(alone=True)) for owner in owners]
    swapped = [(one, match) for one, match in settled if match.attributes["regions"]]
    pairs = [(one, swapped_class(match.kind, type(one), match.attributes)) for one, match in swapped]
    return partial(classes, pairs), run


def _chosen(totals: Mapping[str, Cost], share: float) -> str:
    """The fastest, or one that stands before it and is as fast within the margin, by the host's ``share`` of the time;
    "" where no call could be timed."""
    us = {way: (1.0 - share) * cost.device_us + share * cost.host_us for way, cost in totals.items()}
    return next((way for way, found in us.items() if found <= (1.0 + _MARGIN) * min(us.values())), "")
