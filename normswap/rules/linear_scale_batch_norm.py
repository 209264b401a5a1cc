"""A module whose whole forward is ``self.bn(self.gemm(x) * self.scale)``, in any spelling: the scale may be absent, a
tensor or a number, and stand behind the BatchNorm instead or too."""

from __future__ import annotations

import ast
import types
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import fx, nn

from normswap import source, tracing
from normswap.plan import Match, Reason, Refusal
from normswap.rules.expression_site import (
    MULTIPLICATION,
    Flow,
    besides,
    class_forward,
    names_in,
    not_rewritable,
    recognised_in,
)
from normswap.rules.live_numbers import name_or_number, numbers_of
from normswap.rules.module_site import settled_type, why_not_linear_and_batch_norm
from normswap.rules.sequential_site import match_sequential

KIND = "linear_scale_batch_norm"

_CANONICAL = dict.fromkeys(MULTIPLICATION, "*")
_ROWS = 3
_aten = torch.ops.aten


class _Site(NamedTuple):
    """The attributes of a module that play the parts; the factors are tensors of its own, and numbers."""

    linear: str
    batch_norm: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]


_Factors: TypeAlias = "dict[str, str | float]"
"""What stands before and behind the BatchNorm: "scale" and "after", where there are such, by name or as a number."""

# What tracing said, by forward and by everything of a module that a graph depends on. Weights' sizes are not in it:
# they are checked beforehand, and a graph of these operations does not depend on them.
_traced: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, Refusal | _Factors]]
_traced = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is Linear -> [* scale] -> BatchNorm1d -> [* scale] and nothing else, or an
    nn.Sequential that holds such a run; refuse one that holds these in another form, or whose children are not plain
    ones."""
    if not module._modules or (forward := class_forward(module)) is None:
        return None
    if forward is nn.Sequential.forward:
        return match_sequential(module)
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
    scanned = source.scan(forward)
    if isinstance(scanned, tracing.Rejection):
        return Refusal(KIND, scanned.reason, scanned.detail)
    site = _site(module, scanned, linears, batch_norms)
    if isinstance(site, Refusal):
        return site
    rejection = tracing.own_getattr(module) or tracing.unreadable(module, (site.linear, site.batch_norm, *site.tensors))
    if rejection is not None:
        return Refusal(KIND, rejection.reason, rejection.detail)
    factors = _why_no_site(module, site) or _factors(module, forward, site)
    if isinstance(factors, Refusal):
        return factors
    return Match(KIND, {"linear": site.linear, "batch_norm": site.batch_norm, **factors})


def _site(
    module: nn.Module, scanned: source.Scan, linears: frozenset[str], batch_norms: frozenset[str]
) -> _Site | Refusal:
    """Which attribute plays which part, by the scan; whether they are put together rightly, only the trace tells."""
    called = [name for name in scanned.reads if f"self.{name}" in scanned.operations]
    linear = next((name for name in called if name in linears), "")
    batch_norm = next((name for name in called if name in batch_norms), "")
    extra = besides(scanned, Counter([f"self.{linear}", f"self.{batch_norm}", "*", "*"]), _CANONICAL)
    if not (linear and batch_norm) or extra:
        return Refusal(KIND, Reason.PART_OF_FORWARD, f"besides Linear, scale and BatchNorm1d: {', '.join(extra)}")
    factors = [name for name in scanned.reads if name not in called]
    numbers = tuple(numbers_of(module, factors))
    return _Site(linear, batch_norm, tuple(name for name in factors if name not in numbers), numbers)


def _why_no_site(module: nn.Module, site: _Site) -> Refusal | None:
    """Why the attributes are not what the pattern needs: plain children, and factors of one value per channel."""
    if (refusal := why_not_linear_and_batch_norm(KIND, module, site.linear, site.batch_norm)) is not None:
        return refusal
    channels = module._modules[site.linear].out_features  # type: ignore[union-attr]
    for name in site.tensors:
        scale = tracing.own_tensors(module).get(name)
        if scale is None:
            return Refusal(KIND, Reason.UNSUPPORTED, f"self.{name} is neither a Parameter, a buffer nor a number")
        if tuple(scale.shape) not in ((), (1,), (channels,), (1, channels)):
            detail = f"self.{name} has shape {tuple(scale.shape)}, not (), (1,), ({channels},) or (1, {channels})"
            return Refusal(KIND, Reason.UNSUPPORTED, detail)
    return None


def _factors(module: nn.Module, forward: types.FunctionType, site: _Site) -> Refusal | _Factors:
    """The verdict of both modes' graphs, kept by all that they depend on."""
    linear, batch_norm = module.get_submodule(site.linear), module.get_submodule(site.batch_norm)
    tensors = (*linear.named_parameters(), *batch_norm.named_parameters(), *batch_norm.named_buffers())
    dtypes = tuple((name, tensor.dtype) for name, tensor in tensors)
    scales = tuple((getattr(module, name).dim(), getattr(module, name).dtype) for name in site.tensors)
    key = (forward.__code__, site, scales, dtypes, batch_norm.track_running_stats)
    known = _traced.setdefault(forward, {})
    if key not in known:
        known[key] = _traced_factors(module, site)
    return known[key]


def _traced_factors(module: nn.Module, site: _Site) -> Refusal | _Factors:
    found = [_factors_in(module, site, training) for training in (True, False)]
    if (refusal := next((one for one in found if isinstance(one, Refusal)), None)) is not None:
        return refusal
    if found[0] != found[1]:
        return Refusal(KIND, Reason.UNSUPPORTED, "forward computes another function in eval than in train mode")
    return found[0]


def _factors_in(module: nn.Module, site: _Site, training: bool) -> Refusal | _Factors:
    linear = module.get_submodule(site.linear)
    # momentum None divides by the number of batches seen, a value that fakes do not have; 1.0 stands for it. An eps
    # that PyTorch refuses would speak for every model of the class.
    settings = {site.batch_norm: {"momentum": 1.0, "eps": 1e-5}}
    # Other values in each mode: a number that the source says literally is then not taken for an attribute's.
    values = {name: (0.734375 if training else 1.390625) + index for index, name in enumerate(site.numbers)}
    traced = tracing.trace(
        module,
        (site.linear, site.batch_norm, *site.tensors),
        (_ROWS, linear.in_features),  # type: ignore[arg-type]
        linear.weight.dtype,  # type: ignore[arg-type, union-attr]
        training=training,
        settings=settings,
        values=values,
    )
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    found = _pattern(traced, site, module.get_submodule(site.batch_norm), training, values)
    if found is None or {*site.tensors, *site.numbers} - {*found.values()}:
        mode = "train" if training else "eval"
        computed = ", ".join(str(node.target) for node in traced.operations)
        return Refusal(KIND, Reason.UNSUPPORTED, f"in {mode} mode, forward computes another function: {computed}")
    return found


def _pattern(
    traced: tracing.Traced, site: _Site, batch_norm: nn.Module, training: bool, values: Mapping[str, float]
) -> _Factors | None:
    """The factors of a graph that is exactly ``batch_norm(linear(argument, weight, bias) * scale) * after`` of the
    site's tensors, with each result used once, and in training the count of batches advanced by one where there is
    one. None for any other graph."""
    node_of = {path: node for node, path in traced.inputs.items()}
    nodes = traced.operations
    tracks = bool(training and batch_norm.track_running_stats)
    batches = node_of.get(f"{site.batch_norm}.num_batches_tracked") if tracks else None
    counts = [node for node in nodes if node.target is _aten.add_.Tensor]
    if [(node.args, dict(node.kwargs)) for node in counts] != ([] if batches is None else [((batches, 1), {})]):
        return None
    steps = [node for node in nodes if node not in counts]
    operands = (traced.argument, node_of[f"{site.linear}.weight"], node_of.get(f"{site.linear}.bias"))
    if not steps or steps[0].target is not _aten.linear.default or _arguments(steps[0], 3) != operands:
        return None
    factors: _Factors = {}
    before, seen = steps[0], False
    for node in steps[1:]:
        if node.target is _aten.batch_norm.default and not seen:
            seen = node.args[:6] == (before, *_statistics(node_of, site, batch_norm, training))
        elif node.target is _aten.mul.Tensor and ("after" if seen else "scale") not in factors:
            factor = _factor(node, before, traced, values)
            if factor is None:
                return None
            factors["after" if seen else "scale"] = factor
        else:
            return None
        before = node
    exact = all(len(node.users) == 1 and not node.kwargs for node in steps)
    return factors if seen and exact and traced.result is before else None


def _factor(node: fx.Node, other: fx.Node, traced: tracing.Traced, values: Mapping[str, float]) -> str | float | None:
    """What ``other`` is multiplied by in ``node``: a tensor of the module's own or a number."""
    rest = [argument for argument in node.args if argument is not other]
    if len(node.args) != 2 or len(rest) != 1:
        return None
    if isinstance(rest[0], fx.Node):
        path = traced.inputs.get(rest[0], "")
        return path if path and "." not in path else None
    return name_or_number(rest[0], values)


def _arguments(node: fx.Node, count: int) -> tuple[object, ...]:
    return (*node.args, *[None] * (count - len(node.args)))


def _statistics(
    node_of: dict[str, fx.Node], site: _Site, batch_norm: nn.Module, training: bool
) -> tuple[fx.Node | bool | None, ...]:
    """weight, bias, running_mean, running_var and the flag that nn.BatchNorm1d hands to F.batch_norm."""
    weight, bias, mean, var = (
        node_of.get(f"{site.batch_norm}.{name}") for name in ("weight", "bias", "running_mean", "running_var")
    )
    of_batch = training or (mean is None and var is None)
    reads = not training or batch_norm.track_running_stats
    return weight, bias, mean if reads else None, var if reads else None, of_batch
