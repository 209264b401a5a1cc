"""Which class was installed at a module, what it stands for, and which class was there before.

FSDP, parametrizations and other tools put a class of their own over the one a module has, and ours must be found under
theirs again: it is kept beside the module.
"""

from __future__ import annotations

import types
import weakref
from abc import ABCMeta
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from normswap.plans import Match, NormswapError

# By module; it keeps no hold of that, nor of the class.
_installed: Any = WeakIdKeyDictionary()


class Covered(Exception):
    """A class that cannot be put over another one than it was made for."""


def marks(original: type[nn.Module], match: Match) -> dict[str, Any]:
    """The attributes by which a class is known that is installed for ``match`` in the place of ``original``."""
    return {"_normswap_original": original, "_normswap_match": match}


def is_installed(cls: type) -> bool:
    """Whether swapping installs ``cls``, or a class that it is a subclass of."""
    return hasattr(cls, "_normswap_match")


def installed_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that swapping installed at ``module``, its own or one that another tool has put its own over since;
    None where there is none."""
    cls = type(module)
    return cls if "_normswap_match" in vars(cls) else covered_class(module)


def site_match(module: nn.Module) -> Match | None:
    """What was swapped at ``module``: its kind and attributes; None when it is not swapped."""
    return getattr(installed_class(module), "_normswap_match", None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that was replaced at ``module``; the one it has when none was, or it was put back."""
    return getattr(installed_class(module), "_normswap_original", type(module))


def called_class(module: nn.Module) -> type[nn.Module] | None:
    """``original_class``, where calling ``module`` runs its forward or the one that was installed for it; None where a
    class that was put over that has another forward, is called in its own way, or hides what is registered."""
    cls, installed = type(module), installed_class(module)
    if installed is None or installed is cls:
        return original_class(module)
    same = cls.forward is installed.forward and cls.__call__ is installed.__call__
    return original_class(module) if same and not hides(module, installed) else None


def hides(module: Any, installed: type[nn.Module]) -> bool:
    """Whether a class that was put over ``installed`` gives a registered parameter or buffer of ``module`` in another
    way."""
    for cls in type(module).__mro__:
        if cls is installed:
            return False
        own = vars(cls).keys()
        if not (own.isdisjoint(_ASKED) and own.isdisjoint(module._parameters) and own.isdisjoint(module._buffers)):
            return True
    return False


_ASKED = ("__getattr__", "__getattribute__")


def how_called(cls: Any) -> tuple[Any, Any]:
    """What is run when a module of this class is called, that ``is_called_as`` compares."""
    return cls.forward, cls.__call__


def is_called_as(known: tuple[Any, Any] | None, cls: Any) -> bool:
    """Whether that is what ``how_called`` gives now: who puts a class over ours may give it a forward later."""
    return known is not None and cls.forward is known[0] and cls.__call__ is known[1]


def class_before(module: nn.Module) -> type[nn.Module]:
    """The class that puts ``module`` back: the one that was replaced, under what another tool has put over ours since;
    the one it has when it is not swapped. Raises NormswapError where that tool's class cannot be put over another."""
    installed = installed_class(module)
    if installed is None:
        return type(module)
    try:
        return rebased(type(module), installed, original_class(module))
    except Covered as error:
        raise NormswapError(
            f"a {type(module).__qualname__} was put over the class that was installed, and cannot be put over another "
            f"({error}); undo that first"
        ) from error


def remember(module: nn.Module, installed: type[nn.Module]) -> None:
    """Note that ``module`` was given the class ``installed``."""
    _installed[module] = weakref.ref(installed)


def covered_class(module: nn.Module) -> type[nn.Module] | None:
    """The class installed at ``module`` that is under the one it has now; None where there is none."""
    noted = _installed.get(module)
    installed: type[nn.Module] | None = None if noted is None else noted()
    return installed if installed in type(module).__mro__ else None


def rebased(cls: type, old: type, new: type) -> type:
    """``cls``, which is ``old`` or was put over it, over ``new`` instead.

    Raises Covered for a class with methods that name it (``super()`` does), which run under that class only.
    """
    if cls is old:
        return new
    bases = tuple(rebased(base, old, new) if old in base.__mro__ else base for base in cls.__bases__)
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    for value in body.values():
        if isinstance(value, types.FunctionType) and "__class__" in value.__code__.co_freevars:
            raise Covered(f"{cls.__qualname__}.{value.__name__} calls super()")
    return unannounced(type(cls), cls.__name__, bases, body)


def unannounced(meta: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
    """A new class of the metaclass ``meta`` of which that, where it is a person's own, is not told."""
    maker: Any = ABCMeta if issubclass(meta, ABCMeta) else type
    return maker.__new__(meta, name, bases, body)
