"""A module whose whole forward is ``self.bn(self.gemm(x) * self.scale)``, in any spelling: the scale may be absent, a
tensor or a number, and stand behind the BatchNorm instead or too. Elsewhere, and in an nn.Sequential, it is a region;
here is said why it may be none."""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from normswap.attributes import Rejection, own_getattr, own_tensors, unreadable
from normswap.plan import Match, Reason, Refusal
from normswap.regions.flow import Attribute, Constant, Value
from normswap.regions.linear import product_of, run_before
from normswap.regions.straight import Way, names_of, plain_value, straight
from normswap.rules.expression_site import MULTIPLICATION, Flow, class_forward, names_in, not_rewritable, recognised_in
from normswap.rules.module_site import settled_type, why_not_linear_and_batch_norm

KIND = "linear_scale_batch_norm"

_CALLED = {"linear": F.linear, "batch_norm": F.batch_norm}


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is Linear -> [* scale] -> BatchNorm1d -> [* scale] and nothing else; refuse one that
    holds these in another form, or whose children are not plain ones, and an nn.Sequential of such ones."""
    if not module._modules or (forward := class_forward(module)) is None:
        return None
    if forward is nn.Sequential.forward:
        return _why_no_run(module)
    names = names_in(forward)
    linears = _children(module, nn.Linear, names)
    batch_norms = _children(module, nn.BatchNorm1d, names)
    if not (linears and batch_norms and recognised_in(forward, lambda flow: _looks_like(flow, linears, batch_norms))):
        return None
    refusal = not_rewritable(module, KIND)
    return refusal or _judge(module, forward, linears, batch_norms)


def _children(module: nn.Module, cls: type[nn.Module], names: frozenset[str]) -> frozenset[str]:
    children = ((name, child) for name, child in module._modules.items() if child is not None and name in names)
    return frozenset(name for name, child in children if issubclass(settled_type(child), cls))


def _looks_like(flow: Flow, linears: frozenset[str], batch_norms: frozenset[str]) -> bool:
    """True when a BatchNorm is called on what the output of a Linear called before it flows into."""
    return any(
        _end(linear) <= _end(call)
        for call in flow.calls(batch_norms, *flow.nodes[:1])
        for linear in flow.calls(linears, *call.args, *call.keywords)
    )


def _end(node: ast.Call) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _judge(
    module: nn.Module, forward: types.FunctionType, linears: frozenset[str], batch_norms: frozenset[str]
) -> Match | Refusal:
    read = straight(module, forward)
    if isinstance(read, Rejection):
        return Refusal(KIND, read.reason, read.detail)
    if changed := [name for name, function in _CALLED.items() if getattr(F, name) is not function]:
        return Refusal(KIND, Reason.UNSUPPORTED, f"torch.nn.functional.{changed[0]} was replaced")
    answers = [_parts(module, way, linears, batch_norms) for way in read.ways]
    if (refusal := next((one for one in answers if isinstance(one, Refusal)), None)) is not None:
        return refusal
    first: dict[str, Any] = answers[0]  # type: ignore[assignment]
    if any(one != first for one in answers):
        return Refusal(KIND, Reason.UNSUPPORTED, "forward computes another function in eval than in train mode")
    used = [value for value in first.values() if isinstance(value, str)]
    if read.tested or read.called or not {*read.reads} <= {*used}:
        detail = "forward computes another function: it branches, calls functions of its own or reads more"
        return Refusal(KIND, Reason.UNSUPPORTED, detail)
    rejection = own_getattr(module) or unreadable(module, _tensors(module, used))
    if rejection is not None:
        return Refusal(KIND, rejection.reason, rejection.detail)
    return _why_no_site(module, first) or Match(KIND, first)


def _tensors(module: nn.Module, used: list[str]) -> list[str]:
    """Those of the attributes that are no numbers."""
    return [name for name in used if type(plain_value(module, name)) not in (int, float)]


def _parts(
    module: nn.Module, way: Way, linears: frozenset[str], batch_norms: frozenset[str]
) -> dict[str, Any] | Refusal:
    """The attributes that play the parts on one way through, and the factors, "scale" and "after" the BatchNorm, by
    name or as numbers."""
    called = [op.target[len("self.") :] for op in way.ops if isinstance(op.target, str) and op.target[:5] == "self."]
    linear = next((name for name in called if name in linears), "")
    batch_norm = next((name for name in called if name in batch_norms), "")
    done = Counter("*" if name in MULTIPLICATION else name for name in names_of(way.ops))
    extra = sorted((done - Counter([f"self.{linear}", f"self.{batch_norm}", "*", "*"])).elements())
    if extra:
        return Refusal(KIND, Reason.PART_OF_FORWARD, f"besides Linear, scale and BatchNorm1d: {', '.join(extra)}")
    factors: dict[str, Any] = {}
    value, left = way.result, [f"self.{batch_norm}", f"self.{linear}"]
    for op in reversed(way.ops):
        place = "scale" if len(left) == 1 else "after"
        if op is not value or not left:
            break
        if op.target == left[0] and len(op.args) + len(op.keywords) == 1:
            (value,) = *op.args, *op.keywords.values()
            left.pop(0)
        elif (pair := product_of(op)) is not None and place not in factors:
            value, factor = pair
            if isinstance(found := _factor(module, factor), Refusal):
                return found
            factors[place] = found
        else:
            break
    if left or value is not way.argument:
        computed = ", ".join(names_of(way.ops))
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward computes another function: {computed}")
    return {"linear": linear, "batch_norm": batch_norm, **factors}


def _factor(module: nn.Module, value: Value) -> str | float | Refusal:
    """A Parameter, buffer or number of ``module`` by name, or a number."""
    path = value.path if isinstance(value, Attribute) else ""
    if path and (type(plain_value(module, path)) in (int, float) or own_tensors(module).get(path) is not None):
        return path
    if isinstance(value, Constant) and type(value.value) in (int, float):
        return value.value  # type: ignore[no-any-return]
    shown = f"self.{path}" if path else "a factor"
    return Refusal(KIND, Reason.UNSUPPORTED, f"{shown} is neither a Parameter, a buffer nor a number")


def _why_no_site(module: nn.Module, parts: dict[str, Any]) -> Refusal | None:
    """Why the attributes are not what the pattern needs: plain children, and factors of one value per channel."""
    if (refusal := why_not_linear_and_batch_norm(KIND, module, parts["linear"], parts["batch_norm"])) is not None:
        return refusal
    channels = module._modules[parts["linear"]].out_features  # type: ignore[union-attr]
    for name in (parts.get("scale"), parts.get("after")):
        scale = own_tensors(module).get(name) if isinstance(name, str) else None
        if scale is not None and tuple(scale.shape) not in ((), (1,), (channels,), (1, channels)):
            detail = f"self.{name} has shape {tuple(scale.shape)}, not (), (1,), ({channels},) or (1, {channels})"
            return Refusal(KIND, Reason.UNSUPPORTED, detail)
    return None


def _why_no_run(module: nn.Module) -> Refusal | None:
    """Why none of the Linears in an nn.Sequential is computed with the BatchNorm1d behind it; None where one is, or
    there is none."""
    refusals = [*_refused_runs(module)]
    if not refusals:
        return None
    if type(module).__iter__ is not nn.Sequential.__iter__:  # type: ignore[attr-defined]
        return Refusal(KIND, Reason.UNSUPPORTED, f"{type(module).__name__} has its own __iter__")
    return not_rewritable(module, KIND) or (refusals[0] if all(refusals) else None)


def _refused_runs(module: nn.Module) -> Iterator[Refusal | None]:
    """For each run of children of the right types why it is none, or None."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        is_norm = issubclass(settled_type(child), nn.BatchNorm1d)
        linear, _, apart = run_before(child, children[:index]) if is_norm else ("", (), "")
        if linear and issubclass(settled_type(module._modules[linear]), nn.Linear):  # type: ignore[arg-type]
            refusal = why_not_linear_and_batch_norm(KIND, module, linear, name)
            yield refusal or (Refusal(KIND, Reason.CHILD, f"self.{apart}") if apart else None)
