"""What is said of a model that was swapped already when it was optimized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normswap.plans import Plan, Swap
from normswap.reports import Report, notes_on


def merged(earlier: Report, later: Report, already: Sequence[Swap], order: Sequence[str]) -> Report:
    """``later`` with the sites that were swapped ``already``, as ``earlier`` has them, and what that left alone and
    ``later`` does not speak of; all in the ``order`` of the modules' names."""
    place = {name: index for index, name in enumerate(order)}
    told = {row["name"] for row in later.rows}
    kept = {swap.site.name for swap in already} - told
    left = {refused.site.name for refused in earlier.plan.refused} - kept - told
    rows = [*later.rows, *(row for row in earlier.rows if row["name"] in kept | left and row["name"] in place)]
    rows.sort(key=lambda row: place.get(row["name"], len(place)))
    swaps = {swap.site.name: swap for swap in (*already, *earlier.plan.swaps) if swap.site.name in kept}
    plan = Plan(
        tuple(sorted((*swaps.values(), *later.plan.swaps), key=lambda swap: place[swap.site.name])),
        (*later.plan.refused, *(refused for refused in earlier.plan.refused if refused.site.name in left & {*place})),
        later.plan.gpu or earlier.plan.gpu,
    )
    model = earlier.model if later.model is None else later.model
    return replace(later, rows=tuple(rows), plan=plan, notes=notes_on(rows), model=model)
