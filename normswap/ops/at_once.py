"""Whole calls of a norm in one step: by the library of C++ where it is loaded (normswap/nodes/calls.cpp), or not.

What a call asks of its module and tensors and how it reads them is data here; C++ asks it without a frame of Python. It
answers None where anything is not as it mostly is: what is to be done then, the code in Python finds out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Forward: TypeAlias = "tuple[Any, ...]"
"""A class, the name of its forward, that, its code, and (name, function) of what it calls of torch.nn.functional
(``normswap.forwards.replaced.Replaced.known``), which all must be the same at every call; in a region also the module's
own class's forward and ``__call__``, else None; what there may be behind that: (name, function, code) of each method
that the forward calls, which must be the same too."""
NAMES: dict[str, tuple[Any, ...]] = {
    "layer_norm": ("normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("normalized_shape", "weight", (None,), "eps"),
    "group_norm": ("num_groups", "weight", "bias", "eps"),
    "batch_norm": ("weight", "bias", "eps"),
}
"""The kinds, in C++'s order, and what torch.nn's classes call what ``Norm.names`` lists; of a BatchNorm, called so in
training alone, the ranks of its input come first."""


@dataclass
class Norm:
    """How C++ calls a norm: the module itself, or a child in a region, whose helper gets (owner, packed)."""

    kind: str
    stands: Callable[[Any], Forward | None] = lambda module: None
    """The forward that a module's stands for, asked once a class; None: another one."""
    unless: str | None = None
    """An attribute that must not be true."""
    names: tuple[Any, ...] = ()
    """Of groups, normalized_shape or ranks, weight, bias and eps; a value is the only item of a tuple,
    and the first where the second names an attribute that there may be."""
    child: str | None = None
    children: tuple[str, ...] = ()
    unpack: Callable[[Any], tuple[Any, ...]] | None = None
    position: int = -1
    """Of what is normalised, in a sum; without ``unpack``."""
    lowered: Callable[[Mapping[str, Any], Any], Any] | None = None
    """The dtype that autocast makes of the result, for the children and the input."""
    passes: tuple[str, ...] = ()
    acting: str | None = None
    activation_of: Callable[[Any], Any] | None = None
    activation: tuple[int, float, float] = (0, 0.0, 0.0)
    callees: Callable[[], tuple[Any, ...]] | None = None
    called: tuple[Any, ...] = ()
    offset: Any = (0.0,)
    """Of an RMSNorm, to be added to the weight: as one of ``names``."""
    dtypes: tuple[tuple[Any, Any], ...] = ()
    """Of an RMSNorm by hand, along the last dim: of the input and the weight, None without one, that it is for."""
    rounds: bool = False
    """Of one: before the weight, in 16 bits."""
    region: bool = False
    shared: bool = False
    needs_behind: bool = False
    needs_scale: bool = False

    def made(self, calls: Any) -> Callable[[Any, Any], Any]:
        """Its object in C++."""
        fields: tuple[Any, ...] = (
            *({}, self.stands, self.unless, self.names, self.child, self.children, self.unpack, self.position),
            *(self.lowered, self.passes, self.acting, self.activation_of, self.activation, self.callees, self.called),
            *(self.offset, self.dtypes),
        )
        flags = self.region, self.shared, self.needs_behind, self.needs_scale, self.rounds
        return calls.Norm([*NAMES].index(self.kind), *flags, fields)  # type: ignore[no-any-return]


@dataclass
class Convolution:
    """How C++ calls a Conv2d with a BatchNorm2d behind it in eval, in a region whose helper gets (owner, packed)."""

    of: str
    behind: str
    children: tuple[str, ...]
    stands: Callable[[Any], Forward | None]
    """As ``Norm.stands``, for the norm."""
    inner: Forward
    """The method that the convolution's forward calls, as a forward."""
    cls: type
    passes: tuple[tuple[str, ...], ...]
    """Of children, or children of children, by their names."""
    acting: tuple[str, ...] | None
    activation_of: Callable[[Any], Any]
    activation: tuple[int, float, float] | None
    callees: Callable[[], tuple[Any, ...]]
    called: tuple[Any, ...]
    place: int
    """Of the input, in (input, residual); -1 without a residual."""
    fuses: bool
    """By cuDNN's convolution that ends in a ReLU, not by our kernel."""

    def made(self, calls: Any) -> Callable[[Any, Any], Any]:
        """Its object in C++."""
        fields: tuple[Any, ...] = (
            *(self.of, self.behind, self.children, {}, self.stands, self.passes, self.acting, self.activation_of),
            *(self.activation, self.callees, self.called, self.place, self.cls, self.inner, self.fuses),
        )
        return calls.Convolution(fields)  # type: ignore[no-any-return]


@dataclass
class NormAct:
    """How C++ calls, in eval, a BatchNorm that calls children behind the norm: of (module, input)."""

    passes: tuple[str, ...]
    last: str | None
    """The child that is an activation, if any."""
    activation_of: Callable[[Any], Any]
    callees: Callable[[], tuple[Any, ...]]
    called: tuple[Any, ...]
    ranks: tuple[int, ...]
    """Of its input."""

    def made(self, calls: Any) -> Callable[[Any, Any], Any]:
        """Its object in C++."""
        fields = (self.passes, self.last, self.activation_of, self.callees, self.called, self.ranks)
        return calls.NormAct(fields)  # type: ignore[no-any-return]


@dataclass
class Guarded:
    """How C++ calls a forward with regions, of (module, *args, **kwargs)."""

    rewritten: Callable[..., Any]
    """What runs where all is as it was read."""
    otherwise: Callable[..., Any]
    """What asks in Python whether it is, and runs where it is not."""
    replaced: Any
    """The ``Replaced`` of what the class has in its place."""
    own: tuple[Any, ...]
    """What was read, as ``normswap.forwards.replaced.Read`` has it: the function, its code and defaults."""
    conditions: tuple[tuple[Callable[[Any], Any], bool], ...]
    """Of the module, and whether they are true."""
    known: Mapping[str, Any]
    """The globals of the forward."""
    called: tuple[tuple[str, tuple[Any, ...]], ...]
    """The functions among them that were read too, by their names."""
    in_a_row: Any
    """What an nn.Sequential gives its children by; None of another."""
    torchs: tuple[Any, Any, Any]
    """nn.Module, and what modules are called by."""
    reached: tuple[str, ...]
    """The children that it calls, which nothing may hide."""
    beside: tuple[Any, Any, Any] | None
    """What ``only_compute`` is asked of its children."""

    def made(self, calls: Any) -> Callable[..., Any]:
        """Its object in C++."""
        fields: tuple[Any, ...] = (
            *(self.rewritten, self.otherwise, self.replaced, self.own, self.conditions, self.known, self.called),
            *(self.in_a_row, self.torchs, self.reached, *(self.beside or ((), {}, None))),
        )
        return calls.Guarded(fields)  # type: ignore[no-any-return]


class AtOnce:
    """``call(module, input)``, or (owner, packed) of a region: all of it, or None; of a Guarded with any arguments, and
    what there is otherwise where C++ is not loaded."""

    def __init__(self, norm: Norm | Convolution | NormAct | Guarded | None) -> None:
        self.norm = norm
        self.without = norm.otherwise if isinstance(norm, Guarded) else _declines
        self.call = self.without
        if norm is not None:
            _every.add(self)
            self.serve()

    def serve(self) -> None:
        """Let C++ make the call, if there is any."""
        self.call = self.without if _calls is None or self.norm is None else self.norm.made(_calls)

    def serves(self) -> bool:
        """Whether anything may be called so."""
        return self.call is not self.without


def serve(calls: Any) -> None:
    """From now on ``calls``, the module of C++, makes them; None: nothing does."""
    global _calls, only_compute, folded_linear
    _calls = calls
    only_compute, folded_linear = getattr(calls, "only_compute", None), getattr(calls, "folded_linear", _declines)
    for one in _every:
        one.serve()


def _declines(*_: Any) -> None:
    return None


PASSING: dict[type, bool] = {}
"""The classes of children that hand on what they get, and whether that is a dropout which must be off."""
ACTIVATIONS: dict[type, tuple[int, float, float]] = {}
"""The numbers of the activations that are classes without parameters."""
FORWARDS: dict[type, Forward] = {}
"""The forwards of torch.nn's classes as they were when this was imported."""
only_compute: Any = None
"""See ``normswap.regions.children``."""
folded_linear: Callable[..., Any] = _declines
"""``batch_norm(linear(x) * scale)`` of (x, linear, scale, batch_norm, nn.Linear, nn.BatchNorm1d), or None."""
_every: weakref.WeakSet[AtOnce] = weakref.WeakSet()
_calls: Any = None
