"""How each convolution with a norm behind it is computed: what is right on the example inputs and fastest on the device
there, and as it was where nothing is.

The device's times are steady, so that equal runs decide alike; of a model that waits for its host, what a way costs
that counts as well. Whether the whole model gains is asked afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normswap import modules
from normswap.forwards.replaced import Replaced
from normswap.plan import Match, Plan, Swap
from normswap.regions.compare import compare_region, holder_of
from normswap.regions.foldings import by_default, foldings_of, without_convolution
from normswap.regions.helper import Fused, make_helper
from normswap.regions.install import compiled_of, method_of, with_helpers
from normswap.regions.rewrite import Compiled, Helper
from normswap.regions.spec import Region
from normswap.sites import preserved
from normswap.timing.candidate import Code, Recorder, as_called
from normswap.timing.decision import machine_for, takes_gradients
from normswap.timing.hidden import costs
from normswap.timing.model import waiting
from normswap.timing.sites import looks

APART = "apart"
"""The convolution as it is, and what stands behind it as one op."""
STATEMENTS = "statements"
_MARGIN = 0.03
"""By so much, as a share, must the device be faster for a way to be taken before one that stands earlier."""


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
                with _listening(owners.values()):
                    run()
                reached = [place for place in places if place.form is not None]
                _decide(reached, timed, timed and _waits_for_host(reached, run))
        except torch.OutOfMemoryError:
            for place in places:
                place.chosen = ""
    settled = (Swap(s.site, owners[s.site.name].settled()) if s.site.name in owners else s for s in plan.swaps)
    return Plan(tuple(s for s in settled if s.match.attributes.get("regions", True)), plan.refused)


def _convolves(match: Match) -> bool:
    return any(region["convolution"] for region in match.attributes.get("regions", ()))


@dataclass
class _Place:
    """A region with a convolution, what was right of the ways to compute it, what it was called with and what was
    chosen, "" for the default."""

    compiled: Compiled
    owner: nn.Module
    right: list[str] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    form: TreeSpec | None = None
    chosen: str = ""

    def way(self, folding: str) -> Compiled:
        return replace(self.compiled, region=replace(self.compiled.region, folding=folding))

    def helper(self, owner: Any, packed: Any) -> Any:
        """The statements; the first call also compares all ways with them."""
        leaves, form = tree_flatten(packed)
        self.recorder.add(*leaves)
        if self.form is None:
            self.form = form
            self.right = [one for one in foldings_of(self.compiled.region, self.owner) if self._is_right(one, packed)]
        return self.compiled.snippet(owner, packed)

    def _is_right(self, folding: str, packed: Any) -> bool:
        fused = Fused(self.way(folding), modules.original_class)
        x = self.compiled.unpack(packed)[0]
        if fused.convolved is None or not fused.convolved.serves(self.owner._modules, x):
            return False
        return not compare_region(self.way(folding), fused, self.owner, packed, False, most_pieces=1).problem

    def ways(self) -> list[str]:
        """What may be chosen, in the order of preference."""
        rest = without_convolution(self.compiled.region)
        return [*self.right, *([APART] if rest is not None else []), STATEMENTS]

    def key(self) -> Hashable:
        """All that the time of a call depends on but the call."""
        region = self.compiled.region
        steps = tuple((step.does, step.operand) for step in region.steps)
        return steps, str(region.activation), tuple(self.ways()), looks(holder_of(region, self.owner))

    def code(self, way: str) -> Code:
        function = self.compiled.snippet if way == STATEMENTS else make_helper(self.way(way), modules.original_class)
        holder, form = holder_of(self.compiled.region, self.owner), self.form
        assert form is not None
        return Code(lambda *leaves: function(holder, tree_unflatten(list(leaves), form)))

    def settled(self) -> Region | None:
        """The region as it was decided."""
        region = self.compiled.region
        if not self.chosen:
            return by_default(region, self.owner)
        if self.chosen == STATEMENTS:
            return None
        return without_convolution(region) if self.chosen == APART else replace(region, folding=self.chosen)

    def default(self) -> str:
        """What is chosen where nothing is timed: the default if it was right."""
        region = by_default(self.compiled.region, self.owner)
        folding = "" if region is None else region.folding
        return folding if folding in self.right else APART


class _Owner:
    """A module with regions."""

    def __init__(self, module: nn.Module, match: Match) -> None:
        self.module, self.match, self.method = module, match, method_of(match.attributes)
        self.compiled = compiled_of(type(module), match.attributes)
        self.places = {id(one): _Place(one, module) for one in self.compiled if one.region.convolution}

    def listen(self) -> None:
        """Run the statements of its regions from now on, until the instance's own ``method`` goes."""
        method = with_helpers(Replaced(type(self.module), self.method), self.match.attributes, self._listener)
        self.module.__dict__[self.method] = partial(method, self.module)

    def _listener(self, compiled: Compiled) -> Helper:
        place = self.places.get(id(compiled))
        return compiled.snippet if place is None else place.helper

    def settled(self) -> Match:
        regions = [self.places[id(one)].settled() if id(one) in self.places else one.region for one in self.compiled]
        kept = [region.to_json() for region in regions if region is not None]
        return Match(self.match.kind, {**self.match.attributes, "regions": kept})


@contextlib.contextmanager
def _listening(owners: Any) -> Iterator[None]:
    try:
        for owner in owners:
            owner.listen()
        yield
    finally:
        for owner in owners:
            owner.module.__dict__.pop(owner.method, None)


def _waits_for_host(places: Sequence[_Place], run: Callable[[], Any]) -> bool:
    """Whether ``run``, one of the model, has its device wait for its host."""
    machine = machine_for(sorted({call.device for place in places for call in place.recorder.calls}, key=str))
    return machine is not None and waiting(machine, run).bound == "host"


def _decide(places: Sequence[_Place], timed: bool, by_host: bool) -> None:
    """Choose for every place; calls of equal keys are timed once. ``by_host``: the host's time counts."""
    known: dict[Hashable, dict[str, float]] = {}
    for place in places:
        ways = place.ways()
        totals = dict.fromkeys(ways, 0.0)
        for call, count in place.recorder.calls.items() if timed else ():
            if (key := (place.key(), call)) not in known:
                known[key] = _times_us(place, call, ways, by_host)
            for way, us in known[key].items():
                totals[way] += count * us
        place.chosen = _first_of_the_fastest(totals) if any(totals.values()) else place.default()


def _times_us(place: _Place, call: Any, ways: Sequence[str], by_host: bool) -> dict[str, float]:
    """Microseconds of the device for a ``call`` in each way, or ``by_host`` of what is longer, that or the host's; none
    where nothing can be timed."""
    machine = machine_for([call.device])
    if machine is None:
        return {}
    with torch.inference_mode(False), torch.no_grad(), as_called(call):
        inputs = call.made()
        functions = [call.function(place.code(way), inputs, False) for way in ways]
        found = zip(ways, costs(machine, functions), strict=True)
        return {way: max(cost.device_us, cost.host_us if by_host else 0.0) for way, cost in found}


def _first_of_the_fastest(us: dict[str, float]) -> str:
    """The fastest, or one that stands before it and is as fast within the margin."""
    least = min(us.values())
    return next(way for way, found in us.items() if found <= (1.0 + _MARGIN) * least)
