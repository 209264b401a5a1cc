"""Norms with what is computed before and behind them inside the forward of a module, or in an nn.Sequential.

The norms themselves are sites of their own: a region stands beside them and goes first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from normswap.forwards.plain import is_plain
from normswap.forwards.rms_norm import digest
from normswap.plan import Match, Refusal
from normswap.regions import flow
from normswap.regions.foldings import by_default
from normswap.regions.patterns import NAMES, regions_of
from normswap.regions.sequential import runs_of
from normswap.regions.spec import Region
from normswap.rules.expression_site import class_forward, names_in, not_rewritable
from normswap.tracing import Rejection

KIND = "region"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def match(
    module: nn.Module, find: Callable[[nn.Module], Match | Refusal | None], undecided: bool = False
) -> Match | Refusal | None:
    """Match a module in whose forward a norm can be computed together with its neighbours; ``find`` answers for a child
    alone. What cannot be rewritten is not spoken of: its norms are sites by themselves. ``undecided``: with every
    convolution that a norm can be folded into, and not said how."""
    forward = None if isinstance(module, torch.jit.ScriptModule) else class_forward(module)
    if forward is None or (type(module).__module__.startswith("torch.nn.modules") and not module._modules):
        return None

    def norm_of(child: nn.Module) -> Match | None:
        if type(child) in BATCH_NORMS:  # no site by itself: PyTorch's op is as fast
            fits = is_plain(child, type(child)) and not child.training and child.running_mean is not None
            return Match("batch_norm") if fits else None
        found = find(child)
        return found if isinstance(found, Match) else None

    regions: list[Region] = []
    told: dict[str, str] = {}
    if forward is nn.Sequential.forward:
        if type(module).__iter__ is nn.Sequential.__iter__:  # type: ignore[attr-defined]
            regions = [*runs_of(module, norm_of)]
    else:
        names = names_in(forward)
        if not names & NAMES and not any(name in names for name in module._modules):
            return None
        read = flow.read(module, forward)
        regions = [] if isinstance(read, Rejection) else [*regions_of(module, read, norm_of)]
        functions = {} if isinstance(read, Rejection) else read.functions
        told = {"source": digest([forward, *functions.values()]), "functions": " ".join(functions)}
    if not undecided:
        regions = [one for region in regions if (one := by_default(region, module)) is not None]
    if not regions:
        return None
    return not_rewritable(module, KIND) or Match(KIND, {**told, "regions": [region.to_json() for region in regions]})
