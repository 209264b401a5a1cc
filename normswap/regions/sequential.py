"""The regions of an nn.Sequential: consecutive children, of which the first is a norm and the last an activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from normswap.plan import Match
from normswap.regions.patterns import CHANNELS, CHILDREN, PASSING, ROWS
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, Step

NOWHERE = (0, 0, 0, 0)


def runs_of(module: nn.Module, norm_of: Callable[[nn.Module], Match | None]) -> Iterator[Region]:
    """A region for every norm in ``module`` with an activation behind it; what lies between must hand on its input."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        match, passes = norm_of(child), list[str]()
        if match is None or match.kind not in (*ROWS, *CHANNELS):
            continue
        for behind, other in children[index + 1 :]:
            if type(other) not in PASSING:
                if type(other) in CHILDREN:
                    yield _region(name, child, match, passes, behind)
                break
            passes.append(behind)


def _region(name: str, norm: nn.Module, match: Match, passes: list[str], activation: str) -> Region:
    cls = type(norm)
    does = ("norm", *("pass" for _ in passes), "activation")
    return Region(
        match.kind,
        name,
        tuple(Step(step, NOWHERE) for step in does),
        f"{cls.__module__}.{cls.__qualname__}",
        dict(match.attributes),
        False,
        tuple(passes),
        activation,
    )


def names_of(region: Region) -> list[str]:
    """The children of a region, in order."""
    return [region.norm, *region.passes, str(region.activation)]


def compiled_run(region: Region) -> Compiled:
    """The children called one by one."""
    names = names_of(region)

    def stepped(self: Any, packed: Any, each: Callable[[int, Any], Any]) -> Any:
        for index, name in enumerate(names):
            packed = each(index, self._modules[name](packed))
        return packed

    def snippet(self: Any, packed: Any) -> Any:
        for name in names:
            packed = self._modules[name](packed)
        return packed

    return Compiled(region, snippet, stepped, lambda packed: (packed, None, None, None, None, ()))
