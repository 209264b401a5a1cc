"""A plan and a model make a swapped model, with a journal by which every swap is undone exactly.

The only code that changes a model, and all it changes is ``__class__`` of the modules at the plan's sites.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from normswap import installed, modules, switch
from normswap.plans import NormswapError, Plan, PlanError, Site, Swap
from normswap.untouched import put_back, set_classes

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class Change:
    """One module whose class was changed: the class before and the class installed."""

    site: Site
    module: nn.Module
    before: type[nn.Module]
    after: type[nn.Module]


class Journal:
    """The swaps that ``apply`` made, in order, each until it is undone."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self._changes = [*changes]

    @property
    def changes(self) -> tuple[Change, ...]:
        """What is still swapped."""
        return tuple(self._changes)

    def undo(self, name: str | None = None) -> None:
        """Put back the class of the one site called ``name`` (or an alias of it), or of all sites for None.

        A class that another tool put over ours stays over the original's. Raises NormswapError, with nothing put back,
        when no swapped site has that name, or a module's class has been changed again since in another way.
        """
        chosen = [c for c in self._changes if name is None or name in (c.site.name, *c.site.aliases)]
        if name is not None and not chosen:
            raise NormswapError(f"undo: no swapped site is called {name!r}; swapped are {self._names()}")
        before = [(change.module, installed.class_before(change.module)) for change in chosen]
        for change in chosen:
            if (
                installed.installed_class(change.module) is not change.after
                and type(change.module) is not change.before
            ):
                raise _changed_since(change.site.name, change.module)
        put_back(before)
        self._changes = [change for change in self._changes if change not in chosen]

    def add(self, other: Journal) -> None:
        """Take over the swaps of another."""
        self._changes += other._changes

    def _names(self) -> str:
        return ", ".join(repr(change.site.name) for change in self._changes) or "none"


def apply(model: nn.Module, plan: Plan) -> Journal:
    """Swap every site of ``plan`` in ``model``, in place, and return the journal that undoes it.

    Raises PlanError when a site is missing, is of another type than the plan says, is reachable under other names, or
    holds no such kind; then, and on any other exception, the model is as it was.
    """
    journal = Journal(_changes(model, plan))
    try:
        for change in journal.changes:
            installed.remember(change.module, change.after)
        set_classes((change.module, change.after) for change in journal.changes)
    except BaseException:
        journal.undo()
        raise
    return journal


def swaps_in(model: nn.Module) -> tuple[Swap, ...]:
    """What is swapped in ``model`` now."""
    found = []
    for name, module in model.named_modules():
        if (match := installed.site_match(module)) is not None:
            original = installed.original_class(module)
            found.append(Swap(Site(name, f"{original.__module__}.{original.__qualname__}"), match))
    return tuple(found)


def revert(model: _Module) -> _Module:
    """Give every swapped module in ``model`` its original class back, in place; returns ``model``.

    It needs no journal: swapped modules know what they were. A class that another tool put over ours (FSDP,
    parametrizations) is put over the original. Raises NormswapError, with nothing reverted, where that cannot be done.
    """
    swapped = _swapped(model)
    switch.forget(model)
    try:
        set_classes((module, before) for module, before, _ in swapped)
    except BaseException:
        put_back([(module, now) for module, _, now in swapped])
        raise
    return model


@contextlib.contextmanager
def disabled(model: _Module) -> Iterator[_Module]:
    """Run the original code of every swapped module of ``model`` inside the ``with`` block; afterwards, also after an
    exception, all is as it was. May be nested, and entered by several threads: the last to leave switches back.

    Raises NormswapError as ``revert`` does; at the end too, for a module whose class was changed inside the block: it
    keeps that class.
    """
    _swapped(model)
    with switch.originals(model) as changed:
        yield model
    if changed:
        names = {id(module): name for name, module in model.named_modules()}
        raise _changed_since(names.get(id(changed[0]), "a module"), changed[0])


def _swapped(model: nn.Module) -> list[tuple[nn.Module, type[nn.Module], type[nn.Module]]]:
    """(module, class before, class now) of every swapped module; raises when one was changed again since, in a way that
    is not understood."""
    found = []
    for name, module in model.named_modules():
        if installed.site_match(module) is not None:
            found.append((module, installed.class_before(module), type(module)))
        elif installed.is_installed(type(module)):
            raise _changed_since(name, module)
    return found


def _changed_since(name: str, module: nn.Module) -> NormswapError:
    return NormswapError(
        f"revert: {name or '(root)'} is now a {type(module).__qualname__}, not the class that was installed there; "
        "remove the parametrization (or FSDP wrapping) first, then revert"
    )


def _changes(model: nn.Module, plan: Plan) -> list[Change]:
    changes = [_change(swap, _at(swap.site, model)) for swap in plan.swaps]
    if len({id(change.module) for change in changes}) != len(changes):
        raise PlanError("plan: two sites are the same module in this model; plan it anew")
    return changes


def _at(site: Site, model: nn.Module) -> nn.Module:
    shown = site.name or "(root)"
    module = _submodule(model, site.name)
    if module is None:
        raise PlanError(f"plan: the model has no module {shown}; plan it anew")
    found = f"{type(module).__module__}.{type(module).__qualname__}"
    swapped = installed.site_match(module) is not None
    if found != site.type_name or swapped:
        found = f"a swapped {found}" if swapped else found
        raise PlanError(f"plan: {shown} must be a {site.type_name}, got {found}; plan it anew")
    for alias in site.aliases:
        if _submodule(model, alias) is not module:
            raise PlanError(f"plan: {alias} and {shown} must be the same module; plan it anew")
    return module


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    module: nn.Module | None = model
    for key in name.split(".") if name else ():
        module = None if module is None else module._modules.get(key)
    return module


def _change(swap: Swap, module: nn.Module) -> Change:
    before = type(module)
    try:
        after = modules.swapped_class(swap.match.kind, before, swap.match.attributes)
    except (KeyError, TypeError) as error:
        shown = swap.site.name or "(root)"
        raise PlanError(
            f"plan: {shown}: attributes {dict(swap.match.attributes)} do not fit {swap.match.kind}"
        ) from error
    return Change(swap.site, module, before, after)
