"""Which region's result the next region's convolution alone is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normswap.regions.growing import Growing, only_user, passing
from normswap.regions.spec import Region


def with_successors(
    module: nn.Module,
    made: Sequence[Growing],
    described: Callable[[Growing], Region],
    stands: Callable[[Growing], bool],
) -> Iterator[Region]:
    """What is ``made``, ``described``; each that leads into another and nowhere else, itself or through children that
    hand on what they get, with these and ``then`` set. ``stands`` says whether operations may be moved together."""
    found = [described(one) for one in made]
    starts = {id(one.ops[0]): index for index, one in enumerate(made) if one.convolution}
    for index, one in enumerate(made):
        ops, user = list[Any](), only_user(one.last)
        while user is not None and (name := passing(module, user)):
            ops.append((name, user))
            user = only_user(user)
        following = starts.get(id(user)) if one.convolution and not found[index].has("residual") else None
        if following is None or user is None or user.stretch != one.last.stretch:
            continue
        whole = replace(
            one,
            ops=[*one.ops, *(op for _, op in ops)],
            steps=[*one.steps, *(("pass", op, 0) for _, op in ops)],
            passes=[*one.passes, *(name for name, _ in ops)],
        )
        both = replace(made[following], ops=[*whole.ops, *made[following].ops])
        if stands(both):
            longer = replace(described(whole), beside=found[index].beside)
            found[index] = replace(longer, then=found[following].steps[0].at)
            found[following] = replace(found[following], beside=both.beside)
    yield from found
