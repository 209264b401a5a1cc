"""Regions with convolutions in a row: where nobody but the next one sees what a region gives, it is computed with that,
by one native op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normswap.ops.convolution import FUSED
from normswap.ops.dispatch import PLAIN, any_autocast, direct_op
from normswap.regions.convolution import Directly, direct_way, may_run
from normswap.regions.rewrite import Compiled, Helper

MOST = 4
"""Regions in a row, of one call (kMaxFolds)."""


class Pending:
    """The result of a region that has yet to be computed: the first input of a row of regions, what each of them
    computes with, and the call that gives it by itself."""

    __slots__ = ("call", "sites", "x")

    def __init__(self, x: Tensor, sites: tuple[Any, ...], call: tuple[Helper, Any, Any]) -> None:
        self.x, self.sites, self.call = x, sites, call

    def computed(self) -> Any:
        """The result."""
        helper, owner, packed = self.call
        return helper(owner, packed.computed() if type(packed) is Pending else packed)


def in_rows(compiled: Sequence[Compiled], helpers: Sequence[Helper]) -> list[Helper]:
    """``helpers`` of the regions of one forward, those that lead into one another joined."""
    starts: dict[Any, int] = {
        one.region.steps[0].at: index for index, one in enumerate(compiled) if one.region.convolution
    }
    ways = {index: way for index, one in enumerate(compiled) if (way := direct_way(one)) is not None}
    leads = {index: to for index in ways if (to := starts.get(compiled[index].region.then, -1)) in ways}
    found = [*helpers]
    for index in {*leads, *leads.values()}:
        found[index] = _joined(ways[index], helpers[index], index in leads)
    return found


def _joined(way: Directly, helper: Helper, leads_on: bool) -> Helper:
    """``helper`` of a region that leads on to the next one, or is the last of a row."""
    children = way.children

    def joined(self: Any, packed: Any) -> Any:
        x = packed if way.at < 0 else packed[way.at]
        before = x if type(x) is Pending else None
        compiling = torch.compiler.is_compiling()
        if not compiling and (before is not None or (leads_on and not way.at_once.serves() and _may_wait(x))):
            out = computed(self, packed, x, before)
            if out is not None:
                return out
        return helper(self, packed if before is None else way.given(packed, before.computed()))

    def computed(self: Any, packed: Any, x: Any, before: Pending | None) -> Any:
        own = self.__dict__
        for name in children:
            if name in own:  # it hides the child
                return None
        site = way.site(own["_modules"], packed)
        first, sites = (x, ()) if before is None else (before.x, before.sites)
        if site is None:
            return None
        sites = (*sites, site)
        waits = leads_on and len(sites) < MOST
        return Pending(first, sites, (helper, self, packed)) if waits else way.laid_out(_run(first, sites), site[3])

    return joined


def _may_wait(x: Any) -> bool:
    plain = type(x) in PLAIN and x.is_cuda and x.dtype in FUSED and not x.is_neg()
    return plain and not torch.is_grad_enabled() and not any_autocast()


def _run(x: Tensor, sites: Sequence[Any]) -> Tensor | None:
    op = direct_op("convolutions_batch_norm_eval")
    if op is None or not may_run(any(site[1][-1] == 0 for site in sites)):
        return None
    tensors = [tensor for site in sites for tensor in site[0]]
    numbers = [number for site in sites for number in site[1]]
    floats = [number for site in sites for number in site[2]]
    return op(x, tensors, numbers, floats, sites[-1][3])  # type: ignore[no-any-return]
