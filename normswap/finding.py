"""A model and the rules make a plan: every site once, under all its names, with filters applied."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from normswap import rules
from normswap.plans import Match, Plan, Reason, Refusal, Refused, Site, Swap
from normswap.regions.spec import Region, children_of, qualified

Filter: TypeAlias = "str | Callable[[nn.Module, str], bool] | Iterable[str | Callable[[nn.Module, str], bool]] | None"
"""A glob over qualified names (``"encoder.*"``; ``*`` crosses dots, case counts), ``"re:..."`` for a regular
expression that must match the whole name, ``fn(module, name) -> bool``, or several of these."""


def plan(model: nn.Module, *, include: Filter = None, exclude: Filter = None, undecided: bool = False) -> Plan:
    """What would be swapped in ``model`` and what is refused, in module order; the model is not changed.
    ``undecided``: with every convolution that a norm can be folded into, and not said how.

    A module reachable under several names is one site: its first name, and the others as aliases. A site is taken when
    ``include`` is None or matches any of its names, and ``exclude`` matches none; one that is left out is listed as
    refused with Reason.EXCLUDED. The root has the name "". Raises TypeError for a filter of another type, ValueError
    for a regular expression that does not compile; warns of a pattern that matches no module.
    """
    found = list(_distinct(model))
    included, excluded = _selector(include, "include", found), _selector(exclude, "exclude", found)
    answers = [(place, answer) for place in found if (answer := rules.find(place.module, undecided)) is not None]
    left_out = {id(place.module) for place, _ in answers if excluded is not None and excluded(place)}
    swaps: list[Swap] = []
    refused: list[Refused] = []
    for place, found_there in answers:
        site = Site(place.names[0], qualified(type(place.module)), tuple(place.names[1:]))
        answer = _without(found_there, place.module, left_out)
        if (included is not None and not included(place)) or id(place.module) in left_out:
            refused.append(Refused(site, Refusal(answer.kind, Reason.EXCLUDED)))
        elif isinstance(answer, Match):
            swaps.append(Swap(site, answer))
        else:
            refused.append(Refused(site, answer))
    return Plan(tuple(swaps), tuple(refused))


@dataclass
class _Place:
    """One module object and every name that leads to it, first in module order first."""

    module: nn.Module
    names: list[str] = field(default_factory=list)


def _distinct(model: nn.Module) -> Iterable[_Place]:
    places: dict[int, _Place] = {}
    for name, module in _named(model, "", ()):
        places.setdefault(id(module), _Place(module)).names.append(name)
    return places.values()


def _named(module: nn.Module, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Every (name, module) in module order. Unlike named_modules(remove_duplicate=False) it ends where a module
    holds one of its own ancestors."""
    yield name, module
    above = (*above, id(module))
    for key, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield from _named(child, f"{name}.{key}" if name else key, above)


def _without(match: Match | Refusal, module: nn.Module, left_out: set[int]) -> Match | Refusal:
    """``match`` without the regions that call a site which was left out; a Refusal where no other is left."""
    if isinstance(match, Refusal):
        return match
    regions = match.attributes.get("regions", [])
    called = [{id(module._modules.get(name)) for name in children_of(Region.from_json(r))} for r in regions]
    kept = [region for region, children in zip(regions, called, strict=True) if not children & left_out]
    if len(kept) == len(regions):
        return match
    return Match(match.kind, {**match.attributes, "regions": kept}) if kept else Refusal(match.kind, Reason.EXCLUDED)


def _selector(given: Any, argument: str, found: list[_Place]) -> Callable[[_Place], bool] | None:
    """One predicate over places for all of the filters ``given``; None when there is no filter."""
    if given is None:
        return None
    several = isinstance(given, Iterable) and not isinstance(given, (str, nn.Module, type))
    filters = [*given] if several else [given]
    tests = [_test(one, argument) for one in filters]
    names = [name for place in found for name in place.names]
    for pattern, test in zip(filters, tests, strict=True):
        if isinstance(pattern, str) and not any(test(None, name) for name in names):
            warnings.warn(f"{argument}: the pattern {pattern!r} matches no module", UserWarning, stacklevel=3)
    return lambda place: any(test(place.module, name) for test in tests for name in place.names)


def _test(given: Any, argument: str) -> Callable[[Any, str], bool]:
    """What one filter asks of (module, name)."""
    if isinstance(given, str) and given.startswith("re:"):
        try:
            expression = re.compile(given[len("re:") :])
        except re.error as error:
            raise ValueError(f"{argument}: {given!r} is not a regular expression: {error}") from error
        return lambda module, name: expression.fullmatch(name) is not None
    if isinstance(given, str):
        return lambda module, name: fnmatch.fnmatchcase(name, given)
    if callable(given) and not isinstance(given, (type, nn.Module)):
        return lambda module, name: bool(given(module, name))
    shown = given.__name__ if isinstance(given, type) else type(given).__name__
    raise TypeError(
        f"{argument}: a filter must be a glob, 're:...', fn(module, name) -> bool or a list of these, got {shown}"
    )
