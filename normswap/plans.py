"""What can be swapped, as data: sites, matches, refusals and the plan that holds them.

A plan is printed, written as JSON, read back and replayed; it never touches a model.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

PLAN_FORMAT = 5
"""5: they say of which forward a norm is. 4: a Linear before a norm is a region's, also where the two are a whole
forward. 3: plans name the GPU of their choices. 2: regions name the children called between their statements, which are
looked at on every call."""

REGION = "region"
"""The kind of a site that holds norms among other things; the others are those of ``kinds``."""


class NormswapError(RuntimeError):
    """Base of the errors normswap raises on its own account."""


class MismatchError(NormswapError):
    """A swapped site did not match the original and ``on_mismatch="raise"`` was asked for."""


class NothingSwappedError(NormswapError):
    """No site was swapped and ``on_empty="raise"`` was asked for."""


class PlanError(NormswapError):
    """A plan does not fit the model it is applied to."""


def listed(names: Collection[str], most: int = 10) -> str:
    """The first of ``names``, and how many there are beyond them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + more


class Reason(enum.Enum):
    """Why a recognised site was left alone: the sentence a report shows, and the cure."""

    SUBCLASS = "a subclass with its own forward computes another function", "use the torch.nn class itself"
    DISPATCHED = (
        "accelerate has put a hook around the forward of the instance",
        "call optimize() before accelerate's dispatch_model or prepare, or after remove_hook_from_module",
    )
    INSTANCE_FORWARD = "forward was replaced on the instance", "delete the instance's forward"
    PARAMETRIZED = "the module is parametrized", "remove the parametrization, or apply it after optimize()"
    LAZY = "the module is lazy and has no shapes yet", "run one batch through the model first"
    SHARDED = (
        "its parameters are sharded: they are DTensors outside the model's own forward",
        "call optimize() before fully_shard or parallelize_module",
    )
    SCRIPTED = "the module is a ScriptModule", "optimize the eager model before scripting it"
    EXCLUDED = "left out by include/exclude", "change the filters"
    SOURCE = "the source of forward cannot be read", "define the class in a file"
    NOT_STRAIGHT_LINE = (
        "forward holds control flow, a with block, a store or a name that is not understood",
        "move the normalisation into a module of its own",
    )
    PART_OF_FORWARD = "the expression is part of a larger forward", "move the normalisation into a module of its own"
    CHILD = (
        "a module the expression calls is not a plain torch.nn one, or carries hooks",
        "use plain torch.nn modules, or attach hooks after optimize()",
    )
    TRACE = "forward could not be traced", "move the normalisation into a module of its own"
    MISMATCH = (
        "did not match the original in float64",
        "none is needed, PyTorch's own code runs there; please report it",
    )
    SLOWER = "not faster here", "none is needed; min_speedup=None keeps it swapped"
    DECLINED = (
        "the original's own statements run on these inputs",
        "optimize() with inputs of another dtype, layout or size if those are what the model gets",
    )
    IDENTITY = (
        "the model asks which class this module has, and computes something else where it is another",
        "ask isinstance(module, cls) in the model",
    )
    OWN_CLASS = (
        "code of its class means that class where it asks for the class of self",
        "name the class, or call super() without arguments",
    )
    UNSUPPORTED = "this form is not supported", "see the limits in the README"

    def __init__(self, sentence: str, cure: str) -> None:
        self.sentence, self.cure = sentence, cure


@dataclass(frozen=True)
class Site:
    """One place in a model: a module's qualified name ("" for the root) and its type.

    ``aliases`` are the further names under which the same module object is reachable.
    """

    name: str
    type_name: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """What to put at a site. ``attributes`` holds what the swapped forward needs to know and is
    JSON: for l1_norm ``{"dim": 1, "eps": "eps"}``, for region a list of ``regions.spec.Region`` as data,
    for an RMSNorm written by hand
    ``{"dim": -1, "eps": "variance_epsilon", "weight": "weight", ...}``; empty for module sites."""

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def value(self, module: object, name: str) -> Any:
        """What the attribute ``name`` stands for now: a str names the attribute of ``module`` that holds it."""
        found = self.attributes.get(name)
        return getattr(module, found) if isinstance(found, str) else found

    @property
    def registered(self) -> bool:
        """True for a class that ``register_norm`` was told of: the attributes then say where its values are."""
        return any(name.startswith(READ) for name in self.attributes)

    @property
    def by_hand(self) -> bool:
        """True for an RMSNorm written by hand: the match names its eps. nn.RMSNorm and its subclasses have one."""
        return self.kind == "rms_norm" and "eps" in self.attributes

    def view(self, module: Any) -> Any:
        """``module`` with the attributes that torch.nn's norm of this kind has: itself, or what stands for them in a
        registered one now."""
        if not self.registered:
            return module
        reads = {name[len(READ) :]: value for name, value in self.attributes.items() if name.startswith(READ)}
        found = {n: getattr(module, value, None) if isinstance(value, str) else value for n, value in reads.items()}
        weight = found.get("weight")
        shape = found.get("normalized_shape", ())
        if shape is None and weight is not None:
            shape = tuple(weight.shape)
        found["normalized_shape"] = (shape,) if isinstance(shape, int) else shape
        if found.get("num_channels") is None and weight is not None:
            found["num_channels"] = weight.numel()
        return SimpleNamespace(**found)

    def renamed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """``found``, by the names of torch.nn's norm, by those that the registered class has for them."""
        return {str(self.attributes.get(READ + name, name)): value for name, value in found.items()}


READ = "read."
"""Before the name of a value in the match of a registered class: what follows is where the class keeps it."""


@dataclass(frozen=True)
class Refusal:
    """Recognised, but unsafe or unsupported: the reason goes into the report."""

    kind: str
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.sentence}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Swap:
    """A site and the match found there."""

    site: Site
    match: Match


@dataclass(frozen=True)
class Refused:
    """A site and why it is left alone."""

    site: Site
    refusal: Refusal


@dataclass(frozen=True)
class Plan:
    """All that is to be swapped in one model, and all that was refused, in module order; ``gpu`` is the name of the one
    on which the swaps were chosen by their speed, "" where nothing was timed."""

    swaps: tuple[Swap, ...] = ()
    refused: tuple[Refused, ...] = ()
    gpu: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        swaps = [
            {**_site_json(s.site), "kind": s.match.kind, "attributes": dict(s.match.attributes)} for s in self.swaps
        ]
        refused = [
            {**_site_json(r.site), "kind": r.refusal.kind, "reason": r.refusal.reason.name, "detail": r.refusal.detail}
            for r in self.refused
        ]
        return {"format": PLAN_FORMAT, "gpu": self.gpu, "swaps": swaps, "refused": refused}

    def to_json(self) -> str:
        """The plan as JSON text; ``Plan.from_json`` reads it back to an equal plan."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by ``to_json``. Raises PlanError on anything else."""
        try:
            data = json.loads(text)
            if data["format"] != PLAN_FORMAT:
                raise PlanError(f"plan: format {data['format']} is not {PLAN_FORMAT}; write it anew with this version")
            return cls(
                tuple(Swap(_site_of(d), _match_of(d)) for d in data["swaps"]),
                tuple(
                    Refused(_site_of(d), Refusal(d["kind"], Reason[d["reason"]], d["detail"])) for d in data["refused"]
                ),
                str(data["gpu"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise PlanError(
                f"plan: not a normswap plan ({type(error).__name__}: {error}); report(model).plan.to_json() writes one"
            ) from error

    def __str__(self) -> str:
        lines = [f"{s.site.name or '(root)'}: {s.match.kind}" for s in self.swaps]
        lines += [f"{r.site.name or '(root)'}: {r.refusal.kind} refused, {r.refusal}" for r in self.refused]
        return "\n".join(lines) or "nothing to swap"


def _site_json(site: Site) -> dict[str, Any]:
    return {"name": site.name, "type": site.type_name, "aliases": list(site.aliases)}


def _site_of(data: Mapping[str, Any]) -> Site:
    site = Site(data["name"], data["type"], tuple(data["aliases"]))
    if not all(isinstance(one, str) for one in (site.name, site.type_name, *site.aliases)):
        raise TypeError("a site's names must be strings")
    return site


def _match_of(data: Mapping[str, Any]) -> Match:
    match = Match(data["kind"], {**data["attributes"]})
    if not all(isinstance(region.get("apart", ""), str) for region in match.attributes.get("regions", ())):
        raise TypeError("why a region's norm is apart must be a string")
    return match
