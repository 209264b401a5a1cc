"""A region as data: what is computed there, what is read from where, and which nodes of the source it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from normswap.activation import Activation
from normswap.kinds import KINDS, NORMS
from normswap.plans import Match

Position: TypeAlias = "tuple[int, int, int, int]"
"""Where a node stands: lines from the def on, and columns; first and last."""

ROLES = {
    **{"sum": "before", "product": "scale", "residual": "behind", "gain": "scale", "shift": "shift"},
    "times": "shift",
}
"""What the other operand of a step is called; there is a shift behind a gain, or a factor behind a Linear's norm."""

FOLDINGS = ("scaled", "fused", "folded")
"""The ways to compute a convolution with the norm behind it: by our kernel, which scales and shifts the sums; or with
the norm folded into weight and bias, by the convolution of cuDNN that adds a residual and ends in a ReLU, or as a
convolution and what stands behind it."""


@dataclass(frozen=True)
class Step:
    """One operation of a region, in order: what it does, its node, which of its operands the chain goes through, and
    whether it is a method of its first operand.

    ``does``: "convolution", "linear", "product" (what that gives, by something), "factor" (the same, by a child),
    "sum" (a residual before the norm), "view" (the sum in another shape), "norm", "pass" (a child that hands on what it
    gets), "residual" (added behind the norm), "times" (multiplied), "gain" and "shift" (adaptive norms), "activation",
    "permute" and "permute back".
    """

    does: str
    at: Position
    operand: int = 0
    is_method: bool = False


@dataclass(frozen=True)
class Node:
    """One operation of an expression that is a norm. ``operands``: for each of its node's, in order, the index of the
    node that gives it, the name of a value that the region is given, or "" for what stays in the code."""

    at: Position
    operands: tuple[int | str, ...]
    is_method: bool = False


@dataclass(frozen=True)
class Region:
    """A norm and what is computed with it inside the forward of a module.

    ``kind`` is the norm's; ``norm`` the child that is the norm, of class ``type`` and with the match ``attributes``, or
    the function called where ``type`` is ""; what such a child calls itself behind the norm (its attribute "behind") is
    among ``passes`` and ``activation`` by paths ("bn1.act"), and no step; ``shared``: the sum before the norm is used
    by others too; ``seen``: somebody may ask for its gradient; ``passes``: children that must hand on what they get;
    ``activation``: a child, or (name, low, high); ``conditions``: what the forward branches on that must hold
    (expression, truth); ``convolution``: the child whose output is normalised, with ``folding`` as one of ``FOLDINGS``
    says how the norm goes into it; ``linear``: the Linear, and ``factor``: the child that multiplies its output before
    the norm, by which attribute, and the fingerprint of its forward; ``apart``: why the convolution or Linear before
    the norm is no part of the region; ``feeds``: the child that autocast gives the result in 16 bits and that alone
    gets it, and before it those that hand it on; ``beside``: other children that are called between its operations,
    with the classes in them; ``nodes``: the operations of the norm, unless it is a child that is called with its input
    alone; ``constants``: what it takes that the source names.
    """

    kind: str
    norm: str
    steps: tuple[Step, ...]
    type: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    seen: bool = False
    passes: tuple[str, ...] = ()
    activation: str | tuple[str, float, float] | None = None
    conditions: tuple[tuple[str, bool], ...] = ()
    convolution: str = ""
    folding: str = ""
    linear: str = ""
    factor: tuple[str, ...] = ()
    apart: str = ""
    feeds: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is, for a person: "sum + norm2 + act2"."""
        words = {"sum": "sum", "norm": self.norm, "residual": "residual", "gain": "scale", "shift": "shift"}
        named = self.activation if isinstance(self.activation, str) else (self.activation or ("",))[0]
        words |= {"convolution": self.convolution, "linear": self.linear, "product": "scale", "activation": named}
        words |= {"factor": self.factor[0] if self.factor else "", "times": "scale"}
        return " + ".join(word for step in self.steps if (word := words.get(step.does)))

    @property
    def match(self) -> Match:
        """What is known of the norm."""
        return Match(self.kind, self.attributes)

    @property
    def ends_inside(self) -> bool:
        """Whether the child that is the norm calls the activation."""
        return isinstance(self.activation, str) and "." in self.activation

    def has(self, does: str) -> bool:
        """Whether one of the steps does that."""
        return any(step.does == does for step in self.steps)

    def step(self, does: str) -> Step:
        """The step that does that. Raises StopIteration where there is none."""
        return next(step for step in self.steps if step.does == does)

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads, as JSON text gives it back."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Region:
        """Raises KeyError or TypeError for what ``to_json`` did not write."""
        given = {f.name: _tuples(data[f.name]) for f in fields(cls) if f.name in data}
        given["steps"] = tuple(Step(**step) for step in given["steps"])
        given["nodes"] = tuple(Node(**node) for node in given.get("nodes", ()))
        given.setdefault("seen", given.get("shared", False))  # what earlier versions wrote does not say
        return cls(**given)

    def literal_activation(self) -> Activation | None:
        """The activation that the source names; None where a child says which."""
        return None if isinstance(self.activation, str) else Activation(*(self.activation or ()))


def children_of(region: Region) -> tuple[str, ...]:
    """The children whose calls are part of it."""
    norm = region.norm if region.type else ""
    acting = region.activation if isinstance(region.activation, str) else ""
    before = region.convolution, region.linear, *region.factor[:1]
    called = *before, norm, *region.passes, acting
    return tuple(name for name in called if name and "." not in name)


def parameters_of(region: Region) -> tuple[str, ...]:
    """What the norm of ``region`` takes behind its input, in order; nothing where it is a child."""
    return () if region.type else (KINDS.get(region.kind) or NORMS[region.kind]).parameters


def others_of(region: Region) -> list[str]:
    """What else an expression is given: what it casts to."""
    names = {operand for node in region.nodes for operand in node.operands if isinstance(operand, str)}
    return sorted(names - {"x", "", *parameters_of(region)}) if region.kind in KINDS else []


def qualified(cls: type) -> str:
    """The name of a class in a plan."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _tuples(value: Any) -> Any:
    """Plain data with tuples: JSON has lists alone."""
    if isinstance(value, Mapping):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
