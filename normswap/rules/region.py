"""Norms with what is computed before and behind them inside the forward of a module, or in an nn.Sequential.

The norms themselves are sites of their own: a region stands beside them and goes first.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from normswap.forwards.batch_norm import RANKS
from normswap.forwards.plain import is_plain_itself, is_unhooked
from normswap.forwards.replaced import digest
from normswap.plans import Match, Refusal
from normswap.regions import flow
from normswap.regions.ending import children_behind
from normswap.regions.foldings import by_default, is_foldable
from normswap.regions.patterns import NAMES, regions_of
from normswap.regions.sequential import in_a_row
from normswap.regions.spec import Region
from normswap.regions.straight import method_of
from normswap.regions.through_methods import through_methods
from normswap.rules.expression_site import class_forward, names_in, not_rewritable

KIND = "region"


def match(
    module: nn.Module, find: Callable[[nn.Module], Match | Refusal | None], undecided: bool = False
) -> Match | Refusal | None:
    """Match a module in whose forward a norm can be computed together with its neighbours; ``find`` answers for a child
    alone. What cannot be rewritten is not spoken of: its norms are sites by themselves. ``undecided``: with every
    convolution that a norm can be folded into, and not said how."""
    for reading in readings(module, find):
        regions = [one if undecided else by_default(one, module) for one in reading.regions]
        kept = [region.to_json() for region in regions if region is not None]
        if kept:
            behind = children_behind(module) if isinstance(module, tuple(RANKS)) else None
            told = reading.told if behind is None else {**reading.told, "behind": " ".join(behind)}
            return not_rewritable(module, KIND) or Match(KIND, {**told, "regions": kept})
    return None


@dataclass(frozen=True)
class Reading:
    """The regions found in one function of a module's class, what a match tells of it, and its definition, None of
    nn.Sequential's."""

    regions: list[Region]
    told: Mapping[str, str] = field(default_factory=dict)
    tree: ast.FunctionDef | None = None


def readings(
    module: nn.Module, find: Callable[[nn.Module], Match | Refusal | None], baked: bool = False
) -> Iterator[Reading]:
    """Of the forward of ``module`` and of the methods that it calls; ``baked`` as in ``patterns.regions_of``."""
    forward = None if isinstance(module, torch.jit.ScriptModule) else class_forward(module)
    if forward is None or (type(module).__module__.startswith("torch.nn.modules") and not module._modules):
        return

    def norm_of(child: nn.Module) -> Match | None:
        if type(child) in RANKS or (baked and type(child) is nn.SyncBatchNorm):  # in eval no site by itself
            return Match("batch_norm") if is_plain_itself(child) else None
        if isinstance(child, tuple(RANKS)):
            behind = children_behind(child) if is_foldable(child) and is_unhooked(child) else None
            return Match("batch_norm", {"behind": " ".join(behind)}) if behind is not None else None
        found = find(child)
        return found if isinstance(found, Match) else None

    if forward is nn.Sequential.forward:
        if type(module).__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
            yield Reading([*regions_of(module, in_a_row(module), norm_of, baked)])
        return
    functions = methods_of(module, forward)
    apart = {} if baked or len(functions) == 1 else _apart(module, functions)
    for name, function in functions.items():
        read = flow.read(module, function) if _may_hold(module, function) else None
        if isinstance(read, flow.Flow):
            told = {"source": digest([function, *read.functions.values()]), "functions": " ".join(read.functions)}
            told |= {} if name == "forward" else {"method": name}
            regions = [_told(one, apart) for one in regions_of(module, read, norm_of, baked)]
            yield Reading(regions, told, read.tree)


def _apart(module: nn.Module, functions: Mapping[str, types.FunctionType]) -> dict[str, str]:
    """The convolutions that another method calls than the one that calls the norm behind them, by the norm."""
    norms = [name for name, child in module._modules.items() if isinstance(child, tuple(RANKS)) and is_foldable(child)]
    return {norm: convolution for convolution, norm in through_methods(module, functions, norms)} if norms else {}


def _told(region: Region, apart: Mapping[str, str]) -> Region:
    if region.convolution or region.apart or region.norm not in apart:
        return region
    return replace(region, apart=f"{apart[region.norm]} is called in another method")


def methods_of(module: nn.Module, forward: types.FunctionType) -> dict[str, types.FunctionType]:
    """``forward`` and the methods of its class that it calls, and those that they call, by name; torch.nn's aside."""
    found, waiting = {"forward": forward}, [forward]
    while waiting:
        for name in sorted(names_in(waiting.pop()) - found.keys()):
            method = method_of(type(module), name)
            if method is not None and not str(method.__module__).startswith("torch.nn.modules"):
                found[name] = method
                waiting.append(method)
    return found


def _may_hold(module: nn.Module, function: types.FunctionType) -> bool:
    names = names_in(function)
    return bool(names & NAMES) or any(name in names for name in module._modules)
