"""Why a BatchNorm1d that a module calls behind a Linear is not computed with it, where nothing there is swapped."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from normswap.attributes import Rejection
from normswap.forwards.plain import is_bare, replaced_function
from normswap.plans import Match, Reason, Refusal
from normswap.regions import flow
from normswap.regions.growing import child_called, child_of
from normswap.regions.linear import linear_before
from normswap.regions.sequential import in_a_row
from normswap.rules.expression_site import called_name, class_forward, flow_of, names_in, not_rewritable
from normswap.rules.module_site import is_lazy, settled_type, why_not_exact
from normswap.rules.region import readings

KIND = "linear_scale_batch_norm"


def why_apart(module: nn.Module, find: Callable[[nn.Module], Match | Refusal | None]) -> Refusal | None:
    """The refusal of a module with a Linear before a BatchNorm1d, in its forward or as children of an nn.Sequential;
    None for any other. ``find`` answers for a child alone."""
    forward = class_forward(module) if module._modules else None
    if forward is None:
        return None
    in_a_row = forward is nn.Sequential.forward
    linear, norm = next(_in_a_row(module) if in_a_row else _called(module, forward), ("", ""))
    if not linear:
        return None
    refusal = not_rewritable(module, KIND) or _why_not_plain(module, linear, nn.Linear)
    if (refusal := refusal or _why_not_plain(module, norm, nn.BatchNorm1d)) is not None:
        return refusal
    regions = (region for reading in readings(module, find, baked=True) for region in reading.regions)
    if apart := next((region.apart for region in regions if region.norm == norm), ""):
        return Refusal(KIND, Reason.CHILD if in_a_row else Reason.UNSUPPORTED, f"self.{apart.removeprefix('self.')}")
    if in_a_row:
        return Refusal(KIND, Reason.UNSUPPORTED, f"{type(module).__name__} has its own __iter__")
    return _another(module, forward, linear, norm)


def _why_not_plain(module: nn.Module, name: str, expected: type[nn.Module]) -> Refusal | None:
    """Why the child ``name`` is not a plain ``expected`` without hooks."""
    child: Any = module._modules[name]
    if is_lazy(child):
        return Refusal(KIND, Reason.LAZY, f"self.{name}")
    if (difference := why_not_exact(child, expected)) is not None:
        reason, detail = difference
        return Refusal(KIND, Reason.CHILD, f"self.{name}: {detail if reason is Reason.SUBCLASS else reason.sentence}")
    if changed := replaced_function(expected):
        return Refusal(KIND, Reason.UNSUPPORTED, f"self.{name}: torch.nn.functional.{changed} was replaced")
    return None if is_bare(child.__dict__) else Refusal(KIND, Reason.CHILD, f"self.{name} carries hooks")


def _in_a_row(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Each Linear and the BatchNorm1d behind it among the children of an nn.Sequential."""
    for norm in in_a_row(module).ops:
        before = linear_before(module, norm.args[0]) if _is_a(module, norm, nn.BatchNorm1d) else None
        if before is not None and _is_a(module, linear := before[0][0][1], nn.Linear):
            yield child_called(linear), child_called(norm)


def _is_a(module: nn.Module, op: flow.Op, cls: type[nn.Module]) -> bool:
    child = child_of(module, op)
    return child is not None and issubclass(settled_type(child), cls)


def _called(module: nn.Module, forward: types.FunctionType) -> Iterator[tuple[str, str]]:
    """Each Linear, and BatchNorm1d called on what its output may flow into; any where there is no source to tell."""
    linears, norms = (_children(module, cls, names_in(forward)) for cls in (nn.Linear, nn.BatchNorm1d))
    found = flow_of(forward) if linears and norms else None
    if found is None:
        yield from zip(sorted(linears), sorted(norms), strict=False)
        return
    for norm in found.calls(norms, *found.nodes[:1]):
        for linear in found.calls(linears, *norm.args, *norm.keywords):
            if _end(linear) <= _end(norm):
                yield str(called_name(linear)), str(called_name(norm))


def _children(module: nn.Module, cls: type[nn.Module], names: frozenset[str]) -> frozenset[str]:
    children = ((name, child) for name, child in module._modules.items() if child is not None and name in names)
    return frozenset(name for name, child in children if issubclass(settled_type(child), cls))


def _end(node: ast.Call) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _another(module: nn.Module, forward: types.FunctionType, linear: str, norm: str) -> Refusal:
    """What ``forward`` computes instead."""
    read = flow.read(module, forward)
    if isinstance(read, Rejection):
        return Refusal(KIND, read.reason, read.detail)
    calls = {op.target: op for op in read.ops if isinstance(op.target, str)}
    first, last = calls.get(f"self.{linear}"), calls.get(f"self.{norm}")
    if first is None or last is None or first.stretch != last.stretch:
        detail = f"self.{linear} and self.{norm} are not called in one stretch of straight-line code"
        return Refusal(KIND, Reason.NOT_STRAIGHT_LINE, detail)
    value = next(iter((*last.args, *last.keywords.values())), None)
    of = ast.unparse(value.node) if isinstance(value, flow.Op) else "what is not understood"
    detail = (
        f"self.{norm} is of {of}, neither of self.{linear}(x), which nothing else uses, nor of that times one factor"
    )
    return Refusal(KIND, Reason.UNSUPPORTED, detail)
