"""Whether an installed forward may still stand for the one it replaced, asked on every call: its module may have been
put back while somebody holds on to ``module.forward``, and the original's forward may be another one by now."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from normswap.installed import hides
from normswap.ops.at_once import NAMES, AtOnce, Norm

_Read = TypeVar("_Read")


class Replaced:
    """The function ``name`` of the class ``original``, as it was when the class ``installed`` was made for it; if
    ``whole`` with what it calls of torch.nn.functional, where a profiler may put functions that count."""

    def __init__(self, original: Any, name: str = "forward", *, whole: bool = True) -> None:
        self.original, self.name = original, name
        self.installed: type = object  # until there is one: whatever asks
        self.function = getattr(original, name)
        self.code = code_of(self.function)
        self.functional = _functional_of(self.code) if whole else ()
        self.known = original, name, self.function, self.code, self.functional

    @property
    def argument(self) -> str:
        """The name of the one input of a function(self, input)."""
        return list(inspect.signature(self.function).parameters)[1]

    def is_on(self, module: object) -> bool:
        """True while ``module`` is swapped by ``installed``, and what was replaced is the same."""
        return self.is_unchanged() and self.is_of(module)

    def is_of(self, module: Any) -> bool:
        """True where ``module`` has the class ``installed``, perhaps under another that hides nothing of it."""
        installed = self.installed
        if type(module) is installed or not isinstance(module, installed):
            return isinstance(module, installed)
        return installed is object or torch.compiler.is_compiling() or not hides(module, installed)

    def is_unchanged(self) -> bool:
        """True while the original's function, its code and what that calls are those that were replaced."""
        function = getattr(self.original, self.name)
        if function is not self.function or getattr(function, "__code__", None) is not self.code:
            return False
        if torch.compiler.is_compiling():  # that traces what there is, or the formula of an op
            return True
        for name, one in self.functional:  # noqa: SIM110 - a generator takes longer
            if _FUNCTIONAL.get(name) is not one:
                return False
        return True

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What the original's function is now, on these arguments."""
        return getattr(self.original, self.name)(module, *args, **kwargs)


_FUNCTIONAL = vars(F)


def _functional_of(code: Any) -> tuple[tuple[str, Any], ...]:
    """The functions of torch.nn.functional by whose names a forward with this ``code`` calls anything."""
    found = ((name, _FUNCTIONAL.get(name)) for name in getattr(code, "co_names", ()))
    return tuple((name, one) for name, one in found if isinstance(one, (types.FunctionType, types.BuiltinFunctionType)))


def code_of(function: Any) -> Any:
    """The code of a plain function; None for another callable."""
    return getattr(function, "__code__", None)


class Read:
    """A function whose source was read: others in its place are told from it, and other code and defaults within it."""

    def __init__(self, function: Any) -> None:
        self.function, self.code = function, code_of(function)
        self.defaults = getattr(function, "__defaults__", None)
        self.named = dict(getattr(function, "__kwdefaults__", None) or {})
        self.known = function, self.code, self.defaults, self.named

    def is_it(self, found: Any) -> bool:
        """Whether ``found`` is that function, as it was."""
        if found is not self.function or getattr(found, "__code__", None) is not self.code:
            return False
        if self.code is None or torch.compiler.is_compiling():  # that cannot compare two tuples so
            return True
        if found.__defaults__ is not self.defaults:
            return False
        named = found.__kwdefaults__
        if not named:
            return not self.named
        return named.keys() == self.named.keys() and all(named[name] is one for name, one in self.named.items())


def once_a_code(read: Callable[[Any], _Read]) -> Callable[[Any], _Read]:
    """``read(function)``, asked once for each code that the function has."""
    known: weakref.WeakKeyDictionary[Any, tuple[Any, _Read]] = weakref.WeakKeyDictionary()

    @functools.wraps(read)
    def kept(function: Any) -> _Read:
        found = known.get(function)
        if found is None or found[0] is not code_of(function):
            found = known[function] = code_of(function), read(function)
        return found[1]

    return kept


def digest(functions: Iterable[Any]) -> str:
    """A fingerprint of the source of a forward and what it calls: a module pickled with one version of a
    library must not be swapped by what was read there when it is loaded with another. "" where there is no source."""
    try:
        text = "\n".join(inspect.getsource(function) for function in functions)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_as_read(function: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether a forward is the one of which a norm's match says its "source" or, where it does not, torch.nn's."""
    if "source" in attributes:
        return fingerprint(function) == attributes["source"]
    return str(getattr(function, "__module__", "")).startswith("torch.nn.modules.")


@once_a_code
def fingerprint(function: Any) -> str:
    """The ``digest`` of one function."""
    return digest([function])


def at_once_as(replaced: Replaced, kind: str, *names: Any, unless: str | None = None) -> AtOnce:
    """What computes, in one step of C++, a module that ``replaced.installed`` swaps: a norm of this ``kind`` with its
    groups or normalized_shape, weight, bias and eps in the attributes of these ``names``, those of torch.nn if none;
    not where the attribute ``unless`` is true."""
    stands = lambda module: replaced.known if replaced.is_of(module) else None  # noqa: E731
    plain = replaced.original.__getattribute__ is object.__getattribute__
    return AtOnce(Norm(kind, stands, unless, names or NAMES[kind]) if plain else None)
