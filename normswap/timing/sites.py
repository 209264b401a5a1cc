"""The sites of a plan as candidates: modules, runs of an nn.Sequential, and each region of a forward by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap import installed, modules
from normswap.plans import REGION, Match, Swap
from normswap.regions.helper import make_helper
from normswap.regions.holder import holder_of
from normswap.regions.listening import Listener, listening
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region
from normswap.timing.candidate import Candidate, Code, Recorder
from normswap.timing.choose import NOTHING, Timed
from normswap.timing.decision import UNTIMED, Choice, ModelTime, decide, row, step, takes_gradients
from normswap.untouched import classes, preserved


@dataclass(frozen=True)
class Decision:
    """``left``: what is left of the sites of which not all is kept, None where nothing is; ``rows``: by name what was
    found, of those that were timed. ``model`` is None where nothing could be timed."""

    left: Mapping[str, Match | None] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: ModelTime | None = None


def decide_sites(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], least: float) -> Decision:
    """Which of the sites of ``swaps`` in the swapped ``model`` to keep; ``run`` runs it on its example inputs. In train
    mode, with gradients on, forward and backward are timed, else the forward without gradients."""
    gradients = takes_gradients(model)
    try:
        with preserved(model):
            found = candidates(model, swaps, run, gradients=gradients)
    except torch.OutOfMemoryError:
        untimed = [Timed(Candidate(swap.site.name, swap.match.kind), note=UNTIMED) for swap in swaps]
        return Decision(rows={one.candidate.name: row([one], NOTHING) for one in untimed})
    arranged = arrangements(model, swaps)
    choice = decide(model, found, step(model, run, gradients), arranged, least, gradients=gradients)
    return Decision(left_of(swaps, choice.kept), _rows(swaps, choice), choice.model)


def candidates(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], *, gradients: bool) -> list[Candidate]:
    """The sites of ``swaps`` in the swapped ``model`` with the calls that ``run``, one run of it, brings to them.
    ``gradients``: the run records them, and what is timed has a backward."""
    sites = [_Site(model.get_submodule(swap.site.name), swap) for swap in swaps]
    originals = [(site.module, installed.class_before(site.module)) for site in sites]
    with classes(originals), listening(sites), torch.set_grad_enabled(gradients):
        run()
    return [candidate for site in sites for candidate in site.candidates(gradients)]


class _Site(Listener):
    """What reaches a site in a run of the original."""

    def __init__(self, module: nn.Module, swap: Swap) -> None:
        super().__init__(module, installed.original_class(module), swap.match)
        self.swap = swap
        self.recorders = {id(one): Recorder() for one in self.compiled}

    def heard(self, compiled: Compiled, packed: Any) -> None:
        """Records."""
        self.recorders[id(compiled)].add(packed)

    def candidates(self, gradients: bool) -> list[Candidate]:
        """The site, or each of its regions, with every form of call."""
        return [
            self._candidate(name, one, gradients) for name, one in zip(_names(self.swap), self.compiled, strict=True)
        ]

    def _candidate(self, name: str, compiled: Compiled, gradients: bool) -> Candidate:
        region, codes = compiled.region, lambda: [self._code(compiled, swapped) for swapped in (False, True)]
        uses = self.recorders[id(compiled)].uses(looks_of(region, self.owner), codes, gradients)
        inside = [f"{self.swap.site.name}.{region.norm}".lstrip(".")] if self.is_region and region.type else []
        return Candidate(name, self.match.kind, uses, frozenset(inside))

    def _code(self, compiled: Compiled, swapped: bool) -> Code:
        holder = holder_of(compiled.region, self.owner)
        for child in holder._modules.values():
            object.__setattr__(child, "__class__", installed.original_class(child))
        if self.is_region:
            function = partial(make_helper(compiled) if swapped else compiled.snippet, holder)
        else:
            (function,) = holder._modules.values()
            cls = modules.swapped_class(self.match.kind, self.original, self.match.attributes)
            object.__setattr__(function, "__class__", cls if swapped else self.original)
        return Code(function, [*holder.parameters()])

    @property
    def is_region(self) -> bool:
        return self.match.kind == REGION


def _names(swap: Swap) -> list[str]:
    """Of the candidates that ``swap`` is: the site's, or one for each of several regions."""
    site, count = swap.site.name, len(swap.match.attributes.get("regions", ()))
    return [site] if count <= 1 else [f"{site}[{index}]" for index in range(count)]


def left_of(swaps: Sequence[Swap], kept: Collection[str]) -> dict[str, Match | None]:
    """What is left of the sites of ``swaps`` of which not all candidates are among the ``kept``."""
    matches = {swap.site.name: _kept_of(swap, kept) for swap in swaps}
    return {swap.site.name: matches[swap.site.name] for swap in swaps if matches[swap.site.name] != swap.match}


def _kept_of(swap: Swap, kept: Collection[str]) -> Match | None:
    """What is left of ``swap`` with the candidates ``kept``: all, some of its regions, or None."""
    chosen = [index for index, name in enumerate(_names(swap)) if name in kept]
    regions = swap.match.attributes.get("regions", ())
    if not chosen or len(chosen) >= len(regions):
        return swap.match if chosen else None
    return Match(swap.match.kind, {**swap.match.attributes, "regions": [regions[index] for index in chosen]})


def _rows(swaps: Sequence[Swap], choice: Choice) -> dict[str, dict[str, Any]]:
    """What was timed of each site: of its candidates that are kept, where some are."""
    timed = {one.candidate.name: one for one in choice.timed if one.calls or one.note}
    rows = {}
    for swap in swaps:
        names = [name for name in _names(swap) if name in timed]
        taken = [name for name in names if name in choice.kept] or names
        if names:
            told = f"{len(taken)} of {len(_names(swap))} regions are kept" if len(taken) < len(_names(swap)) else ""
            rows[swap.site.name] = row([timed[name] for name in taken], choice.waits, told)
    return rows


def arrangements(
    model: nn.Module, swaps: Sequence[Swap]
) -> Callable[[Collection[str]], contextlib.AbstractContextManager[None]]:
    """What gives the swapped ``model``, for a block, the original classes at all sites but those named."""
    found = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    return lambda kept: classes([(module, _class_with(module, _kept_of(swap, kept))) for swap, module in found])


def _class_with(module: nn.Module, match: Match | None) -> type[nn.Module]:
    """The class of the swapped ``module`` with ``match`` in the place of what it has."""
    if match is None:
        return installed.class_before(module)
    now = installed.installed_class(module) or type(module)
    new = modules.swapped_class(match.kind, installed.original_class(module), match.attributes)
    return installed.rebased(type(module), now, new)


def looks_of(region: Region, owner: nn.Module) -> tuple[Any, ...]:
    """What tells regions apart whose calls may take different time; where one stands in its forward does not matter."""
    steps = tuple((step.does, step.operand) for step in region.steps)
    constants = repr(region.constants)
    return region.kind, steps, constants, region.shared, str(region.activation), looks(holder_of(region, owner))


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What tells modules apart whose calls may take different time: classes, plain attributes, mode, parameters."""
    found: list[Any] = []
    for one in module.modules():
        plain = {k: v for k, v in one.__dict__.items() if isinstance(v, bool | int | float | str | tuple | None)}
        own = {**one._parameters, **one._buffers}
        tensors = {k: None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for k, t in own.items()}
        found.append((type(one), repr(plain), repr(tensors)))
    return tuple(found)
