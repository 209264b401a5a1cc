"""Which region's result the next region's convolution alone is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from normswap.regions.spec import Region


def with_successors(made: Sequence[Any], regions: Sequence[Region], stands: Callable[[Any], bool]) -> Iterator[Region]:
    """``regions``, each that leads into another and nowhere else with ``then`` set. Of each ``made`` has the
    operations, and ``stands`` says whether those of two may be moved together."""
    found = [*regions]
    starts = {id(one.ops[0]): index for index, one in enumerate(made) if one.convolution}
    for index, one in enumerate(made):
        (user,) = one.last.users if len(one.last.users) == 1 else (None,)
        following = starts.get(id(user)) if one.convolution and not regions[index].has("residual") else None
        if following is None or user is None or user.stretch != one.last.stretch:
            continue
        both = replace(made[following], ops=[*one.ops, *made[following].ops])
        if stands(both):
            found[index] = replace(found[index], then=regions[following].steps[0].at)
            found[following] = replace(found[following], beside=both.beside)
    yield from found
