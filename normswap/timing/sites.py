"""The sites of a plan as candidates: modules, runs of an nn.Sequential, and each region of a forward by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
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
from normswap.untouched import classes


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
            self._candidate(name, one, gradients) for name, one in zip(names_of(self.swap), self.compiled, strict=True)
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


def names_of(swap: Swap) -> list[str]:
    """Of the candidates that ``swap`` is: the site's, or one for each of several regions."""
    site, count = swap.site.name, len(swap.match.attributes.get("regions", ()))
    return [site] if count <= 1 else [f"{site}[{index}]" for index in range(count)]


def kept_of(swap: Swap, kept: Collection[str]) -> Match | None:
    """What is left of ``swap`` with the candidates ``kept``: all, some of its regions, or None."""
    chosen = [index for index, name in enumerate(names_of(swap)) if name in kept]
    regions = swap.match.attributes.get("regions", ())
    if not chosen or len(chosen) >= len(regions):
        return swap.match if chosen else None
    return Match(swap.match.kind, {**swap.match.attributes, "regions": [regions[index] for index in chosen]})


def arrangements(
    model: nn.Module, swaps: Sequence[Swap]
) -> Callable[[Collection[str]], contextlib.AbstractContextManager[None]]:
    """What gives the swapped ``model``, for a block, the original classes at all sites but those named."""
    found = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    return lambda kept: classes([(module, _class_with(module, kept_of(swap, kept))) for swap, module in found])


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
