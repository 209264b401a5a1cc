"""The sites of a plan as candidates: modules, runs of an nn.Sequential, and each region of a forward by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normswap import installed, modules
from normswap.plans import Match, Swap
from normswap.regions.listening import listening
from normswap.timing.candidate import Candidate, Code, Recorder, Use
from normswap.timing.decision import Decision, decide, step, summed_row, takes_gradients, untimed
from normswap.timing.regions import RegionRecorder
from normswap.untouched import classes, detached_copy, preserved


def decide_sites(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], least: float) -> Decision:
    """Which of the sites of ``swaps`` in the swapped ``model`` to keep; ``run`` runs it on its example inputs. In train
    mode, with gradients on, forward and backward are timed, else the forward without gradients."""
    gradients = takes_gradients(model)
    try:
        with preserved(model):
            found = candidates(model, swaps, run, gradients=gradients)
    except torch.OutOfMemoryError:
        return untimed([swap.site.name for swap in swaps])
    arranged = arrangements(model, swaps)
    return _of_sites(decide(model, found, step(model, run, gradients), arranged, least, gradients=gradients), swaps)


def candidates(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], *, gradients: bool) -> list[Candidate]:
    """The sites of ``swaps`` in the swapped ``model`` with the calls that ``run``, one run of it, brings to them.
    ``gradients``: the run records them, and what is timed has a backward."""
    placed = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    sites = {swap.site.name: _whole(module, swap.match) for swap, module in placed if swap.match.kind != "region"}
    regions = {
        swap.site.name: RegionRecorder(module, installed.original_class(module), swap.match)
        for swap, module in placed
        if swap.match.kind == "region"
    }
    originals = [(module, installed.class_before(module)) for _, module in placed]
    with (
        classes(originals),
        listening([*sites.values(), *regions.values()]),
        torch.set_grad_enabled(gradients),
    ):
        run()
    return [
        candidate
        for swap in swaps
        for candidate in _candidates(swap, sites.get(swap.site.name), regions.get(swap.site.name), gradients)
    ]


def _candidates(
    swap: Swap, whole: _Whole | None, regions: RegionRecorder | None, gradients: bool
) -> Iterator[Candidate]:
    site, kind = swap.site.name, swap.match.kind
    if whole is not None:
        yield Candidate(site, kind, whole.uses(gradients))
    if regions is None:
        return
    for name, (norm, uses) in zip(_names(swap), regions.uses(gradients, looks), strict=True):
        inside = [f"{site}.{norm}" if site else norm] if norm else []
        yield Candidate(name, kind, uses, frozenset(inside))


def _names(swap: Swap) -> list[str]:
    """Of the candidates that ``swap`` is: the site's, or one for each of several regions."""
    site, count = swap.site.name, len(swap.match.attributes.get("regions", ()))
    return [site] if count <= 1 else [f"{site}[{index}]" for index in range(count)]


def _kept_of(swap: Swap, kept: Collection[str]) -> Match | None:
    """What is left of ``swap`` with the candidates ``kept``: all, some of its regions, or None."""
    chosen = [index for index, name in enumerate(_names(swap)) if name in kept]
    regions = swap.match.attributes.get("regions", ())
    if not chosen or len(chosen) >= len(regions):
        return swap.match if chosen else None
    return Match(swap.match.kind, {**swap.match.attributes, "regions": [regions[index] for index in chosen]})


def _of_sites(decision: Decision, swaps: Sequence[Swap]) -> Decision:
    """``decision`` on candidates as one on sites."""
    matches = {swap.site.name: _kept_of(swap, decision.kept) for swap in swaps}
    rows = {}
    for swap in swaps:
        names = [name for name in _names(swap) if name in decision.rows]
        taken = [name for name in names if name in decision.kept] or names
        if names:
            told = f"{len(taken)} of {len(_names(swap))} regions are kept" if len(taken) < len(_names(swap)) else ""
            rows[swap.site.name] = summed_row([decision.rows[name] for name in taken], told)
    return replace(
        decision,
        kept=frozenset(name for name, match in matches.items() if match is not None),
        put_back=frozenset(name for name, match in matches.items() if match is None),
        rows=rows,
        trimmed={s.site.name: m for s in swaps if (m := matches[s.site.name]) is not None and m != s.match},
    )


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


@dataclass
class _Whole:
    """What is timed of a module: its class before and after the swap, and what it was called with."""

    module: nn.Module
    original: type[nn.Module]
    swapped: type[nn.Module]
    recorder: Recorder = field(default_factory=Recorder)

    def listen(self) -> Callable[[], object]:
        """Record every call until what this gives is called."""
        hook = lambda module, args, kwargs: self.recorder.add(*args, **kwargs)  # noqa: E731
        return self.module.register_forward_pre_hook(hook, with_kwargs=True).remove

    def uses(self, gradients: bool) -> tuple[Use, ...]:
        return self.recorder.uses((self.swapped, *looks(self.module)), self._codes, gradients)

    def _codes(self) -> tuple[Code, Code]:
        first, second = (detached_copy(self.module, cls) for cls in (self.original, self.swapped))
        return Code(first, [*first.parameters()]), Code(second, [*second.parameters()])


def _whole(module: nn.Module, match: Match) -> _Whole:
    original = installed.original_class(module)
    return _Whole(module, original, modules.swapped_class(match.kind, original, match.attributes))


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What tells modules apart whose calls may take different time: classes, plain attributes, mode, parameters."""
    found: list[Any] = []
    for one in module.modules():
        plain = {k: v for k, v in one.__dict__.items() if isinstance(v, bool | int | float | str | tuple | None)}
        own = {**one._parameters, **one._buffers}
        tensors = {k: None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for k, t in own.items()}
        found.append((type(one), repr(plain), repr(tensors)))
    return tuple(found)
