"""The regions of an nn.Sequential: children in a row, a norm with a convolution before it or an activation behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from normswap.plans import Match
from normswap.regions.activations import CHILDREN
from normswap.regions.foldings import convolution_in, is_foldable
from normswap.regions.growing import CHANNELS, PASSING, ROWS
from normswap.regions.linear import run_before
from normswap.regions.patterns import ending_of
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, Step, children_of, qualified

NOWHERE = (0, 0, 0, 0)


def runs_of(module: nn.Module, norm_of: Callable[[nn.Module], Match | None], baked: bool = False) -> Iterator[Region]:
    """A region for every norm in ``module`` with an activation behind it, or a convolution before a batch norm; what
    lies between norm and activation must hand on its input. ``baked`` as in ``patterns.regions_of``."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        match = norm_of(child)
        if match is None or match.kind not in (*ROWS, *CHANNELS):
            continue
        ending = ending_of(name, child, match)
        if ending is None:
            continue
        inside, activation = ending
        passes, activation = ([], activation) if activation is not None else _behind(children[index + 1 :])
        region = _region(name, child, match, [*inside, *passes], activation)
        if match.kind == "batch_norm":
            region = _with_what_stands_before(region, child, children[:index], baked)
        ends = activation is not None and "." not in activation
        if region.convolution or region.linear or (baked and region.apart) or ends:
            yield region


def _behind(children: list[tuple[str, nn.Module]]) -> tuple[list[str], str | None]:
    """The children up to an activation, and that; none where another child comes first."""
    passes: list[str] = []
    for name, child in children:
        if type(child) in CHILDREN:
            return passes, name
        if type(child) not in PASSING:
            break
        passes.append(name)
    return [], None


def _with_what_stands_before(
    region: Region, norm: nn.Module, children: list[tuple[str, nn.Module]], baked: bool
) -> Region:
    """``region`` with the Linear or the convolution that the norm's input comes from."""
    if type(norm) is nn.BatchNorm1d:
        linear, factor, apart = run_before(norm, children)
        if linear and not apart:
            steps = *_steps("linear", *(["factor"] if factor else [])), *region.steps
            return replace(region, linear=linear, factor=factor, steps=steps)
        region = replace(region, apart=apart)
    convolution, apart = convolution_in(*children[-1], baked=baked) if children and is_foldable(norm) else ("", "")
    steps = (*_steps(*(["convolution"] if convolution else [])), *region.steps)
    return replace(region, convolution=convolution, apart=apart or region.apart, steps=steps)


def _region(
    name: str,
    norm: nn.Module,
    match: Match,
    passes: list[str],
    activation: str | None,
) -> Region:
    does = ["norm", *("pass" for path in passes if "." not in path)]
    does += ["activation"] if activation is not None and "." not in activation else []
    return Region(
        match.kind,
        name,
        _steps(*does),
        qualified(type(norm)),
        dict(match.attributes),
        passes=tuple(passes),
        activation=activation,
    )


def _steps(*does: str) -> tuple[Step, ...]:
    return tuple(Step(step, NOWHERE) for step in does)


def compiled_run(region: Region) -> Compiled:
    """The children called one by one."""
    names = [*children_of(region)]

    def stepped(self: Any, packed: Any, each: Callable[[int, Any], Any]) -> Any:
        for index, name in enumerate(names):
            packed = each(index, self._modules[name](packed))
        return packed

    def snippet(self: Any, packed: Any) -> Any:
        for name in names:
            packed = self._modules[name](packed)
        return packed

    return Compiled(region, snippet, stepped, lambda packed: (packed, None, None, None, None, ()))


def by_itself(module: nn.Module, match: Match) -> tuple[Compiled, nn.Module]:
    """A whole ``module`` that is the norm of ``match`` as a region, and the owner of that."""
    owner = nn.Module()
    owner._modules["norm"] = module
    region = Region(match.kind, "norm", _steps("norm"), qualified(type(module)), dict(match.attributes))
    return compiled_run(region), owner
