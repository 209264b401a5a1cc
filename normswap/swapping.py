"""A plan and a model make a swapped model, in which every swap can be undone exactly.

The only code that changes a model, and all it changes is ``__class__`` of the modules at the plan's sites.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from normswap import installed, modules
from normswap.attributes import modules_in
from normswap.held import ending_in
from normswap.plans import NormswapError, Plan, PlanError, Site, Swap
from normswap.regions.spec import qualified
from normswap.untouched import all_or_none, set_classes

_Module = TypeVar("_Module", bound=nn.Module)


def apply(model: nn.Module, plan: Plan) -> None:
    """Swap every site of ``plan`` in ``model``, in place.

    Raises PlanError when a site is missing, is of another type than the plan says, is reachable under other names, or
    holds no such kind; then, and on any other exception, the model is as it was.
    """
    modules_at = [_at(swap.site, model) for swap in plan.swaps]
    if len({id(module) for module in modules_at}) != len(modules_at):
        raise PlanError("plan: two sites are the same module in this model; plan it anew")
    changes = [(module, _class_for(swap, type(module))) for swap, module in zip(plan.swaps, modules_at, strict=True)]
    with all_or_none(model):
        for change in changes:
            installed.remember(*change)
        set_classes(changes)


def swaps_in(model: nn.Module) -> tuple[Swap, ...]:
    """What is swapped in ``model`` now."""
    found = []
    for name, module in modules_in(model):
        if (match := installed.site_match(module)) is not None:
            found.append(Swap(Site(name, qualified(installed.original_class(module))), match))
    return tuple(found)


def revert(model: _Module, names: Collection[str] | None = None) -> _Module:
    """Give every swapped module in ``model``, or those with these ``names``, its original class back, in place; returns
    ``model``.

    Swapped modules know what they were. A class that another tool put over ours (FSDP,
    parametrizations) is put over the original. Raises NormswapError, with nothing reverted, where that cannot be done.
    """
    chosen = {name: module for name, module in modules_in(model) if names is None or name in names}
    before = _before(chosen)
    with _lock:
        for module in chosen.values():
            _off.pop(module, None)  # a block about it ends without giving it our class back
    with all_or_none(model):
        set_classes(before)
    return model


@contextlib.contextmanager
def disabled(model: _Module) -> Iterator[_Module]:
    """Run the original code of every swapped module of ``model`` inside the ``with`` block; afterwards, also after an
    exception, all is as it was. May be nested, and entered by several threads: the last to leave switches back.

    Raises NormswapError as ``revert`` does; at the end too, for a module whose class was changed inside the block: it
    keeps that class.
    """
    _before(dict(modules_in(model)))
    entered, changed = list[tuple[nn.Module, _Off]](), list[nn.Module]()
    with ending_in([partial(_leave, entered, changed)]):
        with _lock:
            for _, module in modules_in(model):
                if (state := _state_of(module)) is not None:
                    entered.append((module, state))
                    _off[module] = state
                    state.blocks += 1
            set_classes((module, state.original) for module, state in entered if state.blocks == 1)
        yield model
    if changed:
        names = {id(module): name for name, module in modules_in(model)}
        raise _changed_since(names.get(id(changed[0]), "a module"), changed[0])


class _Off:
    """How many blocks a module is in, and its class outside and inside of them."""

    def __init__(self, ours: type[nn.Module], original: type[nn.Module]) -> None:
        self.blocks, self.ours, self.original = 0, ours, original


_off: Any = WeakIdKeyDictionary()
_lock = threading.RLock()


def _state_of(module: nn.Module) -> _Off | None:
    """What is known of a module that is in a block already, or what it is to be; None where nothing was swapped."""
    state: _Off | None = _off.get(module)
    if state is not None and type(module) is state.original:
        return state
    return None if installed.site_match(module) is None else _Off(type(module), installed.class_before(module))


def _leave(entered: list[tuple[nn.Module, _Off]], changed: list[nn.Module]) -> None:
    """End a block; ``changed`` gets the modules whose class was changed within: they keep that class."""
    with _lock:
        last = [(module, state) for module, state in entered if state.blocks == 1 and _off.get(module) is state]
        set_classes((m, state.ours) for m, state in last if type(m) is state.original)
        while entered:
            module, state = entered.pop()
            state.blocks -= 1
            if state.blocks == 0 and _off.get(module) is state:
                del _off[module]
                if type(module) is not state.ours:
                    changed.append(module)


def _before(named: Mapping[str, nn.Module]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """The swapped modules of ``named`` with the classes that put them back; raises when one was changed again since, in
    a way that is not understood."""
    found = []
    for name, module in named.items():
        if installed.site_match(module) is not None:
            found.append((module, installed.class_before(module)))
        elif installed.is_installed(type(module)):
            raise _changed_since(name, module)
    return found


def _changed_since(name: str, module: nn.Module) -> NormswapError:
    return NormswapError(
        f"{name or '(root)'} is now a {type(module).__qualname__}, not the class that was installed there; "
        "remove the parametrization (or FSDP wrapping) first, then revert"
    )


def _at(site: Site, model: nn.Module) -> nn.Module:
    shown = site.name or "(root)"
    module = _submodule(model, site.name)
    if module is None:
        raise PlanError(f"plan: the model has no module {shown}; plan it anew")
    swapped = "" if installed.site_match(module) is None else "a swapped "
    found = f"{swapped}{qualified(type(module))}"
    if found != site.type_name:
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


def _class_for(swap: Swap, before: type[nn.Module]) -> type[nn.Module]:
    try:
        return modules.swapped_class(swap.match.kind, before, swap.match.attributes)
    except PlanError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, StopIteration) as error:  # edited text
        shown = swap.site.name or "(root)"
        raise PlanError(
            f"plan: {shown}: attributes {dict(swap.match.attributes)} do not fit {swap.match.kind}"
        ) from error
