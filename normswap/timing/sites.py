"""Today's sites - whole modules and runs of an nn.Sequential - as candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap import modules
from normswap.plan import Match, Swap
from normswap.sites import classes, detached_copy, preserved
from normswap.timing.candidate import Candidate, Code, Recorder, Use
from normswap.timing.decision import Decision, decide, step, takes_gradients, untimed
from normswap.timing.regions import RegionRecorder


def decide_sites(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], least: float) -> Decision:
    """Which of the sites of ``swaps`` in the swapped ``model`` to keep; ``run`` runs it on its example inputs. In train
    mode, with gradients on, forward and backward are timed, else the forward without gradients."""
    gradients = takes_gradients(model)
    try:
        with preserved(model):
            found = candidates(model, swaps, run, gradients=gradients)
    except torch.OutOfMemoryError:
        return untimed([swap.site.name for swap in swaps])
    return decide(model, found, step(model, run, gradients), arrangements(model, swaps), least, gradients=gradients)


def candidates(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], *, gradients: bool) -> list[Candidate]:
    """The sites of ``swaps`` in the swapped ``model`` with the calls that ``run``, one run of it, brings to them.
    ``gradients``: the run records them, and what is timed has a backward."""
    placed = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    sites = {swap.site.name: _parts(module, swap.match) for swap, module in placed if swap.match.kind != "region"}
    regions = {
        swap.site.name: RegionRecorder(module, modules.original_class(module) or type(module), swap.match)
        for swap, module in placed
        if swap.match.kind == "region"
    }
    originals = [(module, modules.class_before(module) or type(module)) for _, module in placed]
    with (
        classes(originals),
        _listening(regions.values()),
        _recording([part for parts in sites.values() for part in parts]),
        torch.set_grad_enabled(gradients),
    ):
        run()
    return [_candidate(swap, sites.get(swap.site.name, ()), regions.get(swap.site.name), gradients) for swap in swaps]


def _candidate(swap: Swap, parts: Sequence[_Part], regions: RegionRecorder | None, gradients: bool) -> Candidate:
    name = swap.site.name
    if regions is None:
        return Candidate(name, swap.match.kind, tuple(use for part in parts for use in part.uses(gradients)))
    inside = frozenset(f"{name}.{norm}" if name else norm for norm in regions.norms())
    return Candidate(name, swap.match.kind, tuple(regions.uses(gradients, looks)), inside)


@contextlib.contextmanager
def _listening(recorders: Iterable[RegionRecorder]) -> Iterator[None]:
    """Record in the block what reaches the regions."""
    listening = [*recorders]
    try:
        for recorder in listening:
            recorder.listen()
        yield
    finally:
        for recorder in listening:
            recorder.owner.__dict__.pop(recorder.method, None)


def arrangements(
    model: nn.Module, swaps: Sequence[Swap]
) -> Callable[[Collection[str]], contextlib.AbstractContextManager[None]]:
    """What gives the swapped ``model``, for a block, the original classes at all sites but those named."""
    found = [(swap.site.name, model.get_submodule(swap.site.name)) for swap in swaps]
    known = [(name, module, modules.class_before(module) or type(module)) for name, module in found]
    return lambda kept: classes([(module, original) for name, module, original in known if name not in kept])


@dataclass
class _Part:
    """What is timed of a site: a module, its class before and after the swap, and the module whose inputs it takes."""

    module: nn.Module
    original: type[nn.Module]
    swapped: type[nn.Module]
    called: nn.Module
    recorder: Recorder = field(default_factory=Recorder)

    def uses(self, gradients: bool) -> tuple[Use, ...]:
        return self.recorder.uses((self.swapped, *looks(self.module)), self._codes, gradients)

    def _codes(self) -> tuple[Code, Code]:
        first, second = (detached_copy(self.module, cls) for cls in (self.original, self.swapped))
        return Code(first, [*first.parameters()]), Code(second, [*second.parameters()])


def _parts(site: nn.Module, match: Match) -> list[_Part]:
    found = []
    for piece, module, called in modules.pieces(site, match):
        original = modules.original_class(module) or type(module)
        found.append(_Part(module, original, modules.swapped_class(piece.kind, original, piece.attributes), called))
    return found


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What tells modules apart whose calls may take different time: classes, plain attributes, mode, parameters."""
    found: list[Any] = []
    for one in module.modules():
        plain = {k: v for k, v in one.__dict__.items() if isinstance(v, bool | int | float | str | tuple | None)}
        own = {**one._parameters, **one._buffers}
        tensors = {k: None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for k, t in own.items()}
        found.append((type(one), repr(plain), repr(tensors)))
    return tuple(found)


@contextlib.contextmanager
def _recording(parts: Sequence[_Part]) -> Iterator[None]:
    handles = []
    try:
        for part in parts:  # a hook on a child of a swapped module has that call it
            handles.append(part.called.register_forward_pre_hook(_hook(part.recorder), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(recorder: Recorder) -> Callable[..., None]:
    return lambda module, args, kwargs: recorder.add(*args, **kwargs)
