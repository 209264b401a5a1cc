"""``act(group_norm(x))`` in one kernel, as a swapped module runs it: norm and activation are read anew on every call,
and only while each is still the plain module it was.

The match says where the norm is (``norm``, a child; the module itself where it is absent), and what comes after it:
``activation``, one that the forward names, or ``children``, of which one is an activation and the others nn.Identity::

    {"norm": "gn", "activation": "silu"}
    {"norm": "gn", "children": ["act"]}
    {"children": ["drop", "act"], "unless": "_fast_norm"}

At an nn.Sequential it lists the runs of consecutive children: ``{"runs": [{"norm": "0", "children": ["1"]}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from normswap import ops
from normswap.forwards import affine_of, only_argument
from normswap.forwards.plain import is_plain
from normswap.forwards.replaced import Replaced
from normswap.forwards.sequential import sequential_forward

_Forward: TypeAlias = Callable[..., Tensor]

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Identity: "none"}


def activation_of(children: Sequence[Any]) -> str | None:
    """What calling these modules one after the other does to a norm's output, which nobody else sees; None where that
    is no activation of ours, or more than one."""
    found: str | None = "none"
    for child in children:
        name = _activation(child)
        if name is None or "none" not in (name, found):
            return None
        found = name if found == "none" else found
    return found


def _activation(child: Any) -> str | None:
    cls = type(child)
    if cls is nn.GELU and is_plain(child, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(child.approximate)
    return _ACTIVATIONS[cls] if cls in _ACTIVATIONS and is_plain(child, cls) else None


def make_forward(replaced: Replaced, attributes: Mapping[str, Any], argument: str) -> _Forward:
    """The forward of the swapped class: one op where that is sure to be right, else the original's. Raises TypeError
    for attributes of other types."""
    if "runs" in attributes:
        runs = [(run_names(run), partial(_run, run)) for run in attributes["runs"]]
        return sequential_forward(replaced, runs)
    norm, flag = attributes.get("norm"), attributes.get("unless")
    literal, children = attributes.get("activation"), _checked(attributes.get("children", []))
    _checked([name for name in (norm, flag, literal) if name is not None])
    if literal is not None and literal not in ops.ACTIVATIONS:
        raise TypeError(f"group_norm_activation: no activation is called {literal!r}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if len(args) == 1 and not kwargs else only_argument(args, kwargs, argument)
        if isinstance(x, Tensor) and replaced.is_on(self) and not (flag and getattr(self, flag)):
            normalising = self if norm is None else getattr(self, norm)
            activation = literal or activation_of([getattr(self, name) for name in children])
            if activation is not None and (norm is None or is_plain(normalising, nn.GroupNorm)):
                return normalised(x, normalising, activation)
        return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

    return forward


def normalised(x: Tensor, norm: Any, activation: str) -> Tensor:
    """``activation`` of what ``norm`` makes of ``x``."""
    return ops.group_norm(x, norm.num_groups, *affine_of(norm), norm.eps, activation)


def run_names(run: Mapping[str, Any]) -> list[str]:
    """The children of one run, in order."""
    return _checked([run["norm"], *run["children"]])


def _run(run: Mapping[str, Any], x: Tensor, children: Mapping[str, nn.Module | None]) -> Tensor | None:
    norm, activation = children[run["norm"]], activation_of([children[name] for name in run["children"]])
    if activation is None or not is_plain(norm, nn.GroupNorm):
        return None
    return normalised(x, norm, activation)


def _checked(names: Sequence[Any]) -> list[str]:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"group_norm_activation: the name of an attribute must be a str, got {name!r}")
    return [*names]
