"""Which class was installed at a module, kept beside it: FSDP, parametrizations and other tools put a class of their
own over the one a module has, and ours must be found under theirs again."""

from __future__ import annotations

import types
import weakref
from abc import ABCMeta
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# By module; it keeps no hold of that, nor of the class.
_installed: Any = WeakIdKeyDictionary()


class Covered(Exception):
    """A class that cannot be put over another one than it was made for."""


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
