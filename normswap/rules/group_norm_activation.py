"""An activation of what a GroupNorm gives: a module whose whole forward is ``act(self.norm(x))``, in any spelling, and
consecutive children of an nn.Sequential. A larger forward is not spoken of: its norm is a site of its own.

Subclasses of nn.GroupNorm that end in an activation (timm's GroupNormAct) are read in ``subclass_site``.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from normswap import tracing
from normswap.forwards.group_norm_activation import activation_of
from normswap.plan import Match, Reason, Refusal
from normswap.rules import source
from normswap.rules.expression_site import MULTIPLICATION, class_forward, names_in, not_rewritable
from normswap.rules.module_site import why_not_plain
from normswap.rules.subclass_site import why_no_activation

KIND = "group_norm_activation"

_MODULES = (nn.ReLU, nn.SiLU, nn.GELU)
_FUNCTIONS = frozenset({"relu", "relu_", "silu", "gelu"})
_aten = torch.ops.aten
_TARGETS: dict[Any, str] = {
    _aten.relu.default: "relu",
    _aten.relu_.default: "relu",
    _aten.silu.default: "silu",
    _aten.silu_.default: "silu",
    _aten.gelu.default: "gelu",
}

# What tracing said, by forward and by all of a module that its graph depends on.
_traced: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, Refusal | str]]
_traced = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is an activation of its GroupNorm's output and nothing else, or an nn.Sequential
    that holds such a pair; refuse one whose children are not plain ones."""
    if not module._modules or (forward := class_forward(module)) is None:
        return None
    if forward is nn.Sequential.forward:
        return _match_sequential(module)
    norms = [name for name, child in module._modules.items() if _is_group_norm(child) and name in names_in(forward)]
    if len(norms) != 1:
        return None
    scanned = source.scan(forward)
    if isinstance(scanned, tracing.Rejection) or (called := _called_after(scanned, *norms)) is None:
        return None
    return _judge(module, forward, norms[0], called)


def _is_group_norm(child: nn.Module | None) -> bool:
    """True for an nn.GroupNorm, plain or not; a subclass's own forward is another function."""
    return type(child) is nn.GroupNorm or (isinstance(child, nn.GroupNorm) and parametrize.is_parametrized(child))


def _called_after(scanned: source.Scan, norm: str) -> str | None:
    """The child called after ``norm`` where a forward calls these two and does nothing else; "" where it applies a
    function instead; None for any other forward."""
    if len(scanned.operations) < 2 or scanned.operations[0] != f"self.{norm}":
        return None
    rest = scanned.operations[1:]
    if scanned.reads == (norm,):
        one = len(rest) == 1 and rest[0] in _FUNCTIONS
        return "" if one or (len(rest) == 2 and rest[0] == "sigmoid" and rest[1] in MULTIPLICATION) else None
    called = [name for name in scanned.reads if name != norm]
    return called[0] if len(called) == 1 and rest == (f"self.{called[0]}",) else None


def _judge(module: nn.Module, forward: types.FunctionType, norm: str, called: str) -> Match | Refusal | None:
    if called and not isinstance(module._modules.get(called), _MODULES):
        return None
    refusal = not_rewritable(module, KIND) or why_not_plain(KIND, norm, module._modules[norm], nn.GroupNorm)
    if refusal is None and called:
        refusal = why_no_activation(module, [called])
    if refusal is not None:
        return refusal
    found = _activation_traced(module, forward, norm, called)
    if isinstance(found, Refusal):
        return found
    return Match(KIND, {"norm": norm, "children": [called]} if called else {"norm": norm, "activation": found})


def _activation_traced(module: nn.Module, forward: types.FunctionType, norm: str, called: str) -> Refusal | str:
    """The activation that the graph of forward shows, kept by all that it depends on."""
    child: Any = module._modules[norm]
    activation = activation_of([module._modules[called]]) if called else None
    key = (forward.__code__, norm, called, activation, child.weight is None, child.bias is None)
    known = _traced.setdefault(forward, {})
    if key not in known:
        known[key] = _trace(module, norm, called, activation)
    return known[key]


def _trace(module: nn.Module, norm: str, called: str, activation: str | None) -> Refusal | str:
    child: Any = module._modules[norm]
    # Numbers of a module like any other: what PyTorch refuses would speak for every model of the class.
    settings = {norm: {"num_groups": 1, "num_channels": child.num_channels, "eps": 1e-3}}
    shape, reads = (2, child.num_channels, 3), [norm, called] if called else [norm]
    dtype = torch.float32 if child.weight is None else child.weight.dtype
    traced = tracing.trace(module, reads, shape, dtype, training=True, settings=settings)
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    found = _pattern(traced, norm)
    if found is None or (called and found != activation):
        computed = ", ".join(str(node.target) for node in traced.operations)
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward computes another function: {computed}")
    return found


def _pattern(traced: tracing.Traced, norm: str) -> str | None:
    """The activation of a graph that is exactly ``act(group_norm(argument, ..., weight, bias, ...))``; None for any
    other graph."""
    if len(traced.operations) < 2:
        return None
    normalised, *rest = traced.operations
    node_of = {path: node for node, path in traced.inputs.items()}
    affine = node_of.get(f"{norm}.weight"), node_of.get(f"{norm}.bias")
    expected = (traced.argument, 1, *affine, 1e-3)
    if normalised.target is not _aten.group_norm.default or normalised.args[:5] != expected:
        return None
    if traced.result is not rest[-1]:
        return None
    return _activation_in(rest, normalised)


def _activation_in(nodes: list[fx.Node], x: fx.Node) -> str | None:
    """The activation that ``nodes`` are of ``x``, which nothing else may use."""
    if len(nodes) == 2:
        gate, product = nodes
        is_silu = (
            gate.target is _aten.sigmoid.default
            and gate.args == (x,)
            and product.target is _aten.mul.Tensor
            and product.args in ((x, gate), (gate, x))
        )
        return "silu" if is_silu else None
    (node,) = nodes
    name = _TARGETS.get(node.target)
    if node.args != (x,) or len(x.users) != 1 or (name != "gelu" and node.kwargs):
        return None
    if name == "gelu" and node.kwargs not in ({}, {"approximate": "none"}):
        return "gelu_tanh" if node.kwargs == {"approximate": "tanh"} else None
    return name


# --- nn.Sequential ------------------------------------------------------------------------------------------------


def _match_sequential(module: nn.Module) -> Match | Refusal | None:
    found = list(_pairs(module))
    if not found:
        return None
    if type(module).__iter__ is not nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Refusal(KIND, Reason.UNSUPPORTED, f"{type(module).__name__} has its own __iter__")
    if (refusal := not_rewritable(module, KIND)) is not None:
        return refusal
    refusals = [
        why_not_plain(KIND, norm, module._modules[norm], nn.GroupNorm) or why_no_activation(module, [activation])
        for norm, activation in found
    ]
    runs = [
        {"norm": norm, "children": [activation]}
        for (norm, activation), refusal in zip(found, refusals, strict=True)
        if refusal is None
    ]
    return Match(KIND, {"runs": runs}) if runs else refusals[0]


def _pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Every GroupNorm with an activation behind it, by name, whether they are plain ones or not."""
    names = list(module._modules)
    for norm, activation in itertools.pairwise(names):
        if _is_group_norm(module._modules[norm]) and isinstance(module._modules[activation], _MODULES):
            yield norm, activation
