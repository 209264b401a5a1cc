"""A module whose whole forward is ``self.bn(self.gemm(x) * self.scale)``, in any spelling."""

from __future__ import annotations

import ast
import types
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import fx, nn

from normswap import tracing
from normswap.plan import Match, Reason, Refusal
from normswap.rules import source
from normswap.rules.expression_site import (
    MULTIPLICATION,
    Flow,
    besides,
    called_name,
    class_forward,
    names_in,
    not_rewritable,
    recognised_in,
)
from normswap.rules.module_site import is_lazy, settled_type, why_not_exact

KIND = "linear_scale_batch_norm"

_CANONICAL = dict.fromkeys(MULTIPLICATION, "*")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ROWS = 3
_aten = torch.ops.aten


class _Site(NamedTuple):
    """The attributes of a module that play the three parts."""

    linear: str
    scale: str
    batch_norm: str


# What tracing said, by forward and by everything of a module that a graph depends on. Weights' sizes are not in it:
# they are checked beforehand, and a graph of these three operations does not depend on them.
_traced: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, Refusal | None]] = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is Linear -> * scale -> BatchNorm1d and nothing else; refuse one that holds these
    in another form, or whose children are not plain ones."""
    if not module._modules or (forward := class_forward(module)) is None:
        return None
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
    """True when a BatchNorm is called on what a product flows into, and a Linear's output into that product."""
    return any(
        any(True for _ in flow.calls(linears, product))
        for call in flow.calls(batch_norms, *flow.nodes[:1])
        for product in flow.into(*call.args, *call.keywords)
        if _is_product(product)
    )


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return called_name(node) in MULTIPLICATION | {"mul_"}
    return isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Mult)


def _judge(
    module: nn.Module, forward: types.FunctionType, linears: frozenset[str], batch_norms: frozenset[str]
) -> Match | Refusal:
    scanned = source.scan(forward)
    if isinstance(scanned, tracing.Rejection):
        return Refusal(KIND, scanned.reason, scanned.detail)
    site = _site(scanned, linears, batch_norms)
    if isinstance(site, Refusal):
        return site
    if (rejection := tracing.unreadable(module, scanned.reads)) is not None:
        return Refusal(KIND, rejection.reason, rejection.detail)
    refusal = _why_no_site(module, site) or _why_no_match(module, forward, scanned, site)
    return refusal or Match(KIND, site._asdict())


def _site(scanned: source.Scan, linears: frozenset[str], batch_norms: frozenset[str]) -> _Site | Refusal:
    """Which attribute plays which part, by the scan; whether they are put together rightly, only the trace tells."""
    called = [name for name in scanned.reads if f"self.{name}" in scanned.operations]
    linear = next((name for name in called if name in linears), "")
    batch_norm = next((name for name in called if name in batch_norms), "")
    extra = besides(scanned, Counter([f"self.{linear}", f"self.{batch_norm}", "*"]), _CANONICAL)
    if not (linear and batch_norm) or extra:
        return Refusal(KIND, Reason.PART_OF_FORWARD, f"besides Linear, scale and BatchNorm1d: {', '.join(extra)}")
    scales = [name for name in scanned.reads if name not in called]
    if len(scales) != 1:
        found = f"self.{', self.'.join(scales)}" if scales else "none"
        return Refusal(KIND, Reason.UNSUPPORTED, f"one scale, a Parameter or a buffer, is needed; found {found}")
    return _Site(linear, scales[0], batch_norm)


def _why_no_site(module: nn.Module, site: _Site) -> Refusal | None:
    """Why the attributes are not what the pattern needs: plain children, and a scale of one value per channel."""
    linear, batch_norm = module._modules[site.linear], module._modules[site.batch_norm]
    for name, child, expected in ((site.linear, linear, nn.Linear), (site.batch_norm, batch_norm, nn.BatchNorm1d)):
        if (refusal := _why_not_plain(name, child, expected)) is not None:
            return refusal
    scale = tracing.own_tensors(module).get(site.scale)
    if scale is None:
        return Refusal(KIND, Reason.UNSUPPORTED, f"self.{site.scale} is neither a Parameter nor a buffer")
    channels = linear.out_features  # type: ignore[union-attr]
    if batch_norm.num_features != channels:  # type: ignore[union-attr]
        return Refusal(KIND, Reason.UNSUPPORTED, f"self.{site.linear} and self.{site.batch_norm} differ in channels")
    if tuple(scale.shape) not in ((), (1,), (channels,), (1, channels)):
        detail = f"self.{site.scale} has shape {tuple(scale.shape)}, not (), (1,), ({channels},) or (1, {channels})"
        return Refusal(KIND, Reason.UNSUPPORTED, detail)
    return None


def _why_not_plain(name: str, child: nn.Module | None, expected: type[nn.Module]) -> Refusal | None:
    if child is None or is_lazy(child):
        return Refusal(KIND, Reason.LAZY, f"self.{name}")
    if (difference := why_not_exact(child, expected)) is not None:
        reason, detail = difference
        return Refusal(KIND, Reason.CHILD, f"self.{name}: {detail if reason is Reason.SUBCLASS else reason.sentence}")
    if any(getattr(child, hooks) for hooks in _HOOKS):
        return Refusal(KIND, Reason.CHILD, f"self.{name} carries hooks")
    return None


def _why_no_match(module: nn.Module, forward: types.FunctionType, scanned: source.Scan, site: _Site) -> Refusal | None:
    """The verdict of both modes' graphs, kept by all that they depend on."""
    linear, batch_norm = module.get_submodule(site.linear), module.get_submodule(site.batch_norm)
    scale = getattr(module, site.scale)
    tensors = (*linear.named_parameters(), *batch_norm.named_parameters(), *batch_norm.named_buffers())
    dtypes = tuple((name, tensor.dtype) for name, tensor in tensors)
    key = (forward.__code__, site, scale.dim(), scale.dtype, dtypes, batch_norm.track_running_stats)
    known = _traced.setdefault(forward, {})
    if key not in known:
        refusals = (_why_no_match_in(module, scanned, site, training) for training in (True, False))
        known[key] = next((refusal for refusal in refusals if refusal is not None), None)
    return known[key]


def _why_no_match_in(module: nn.Module, scanned: source.Scan, site: _Site, training: bool) -> Refusal | None:
    linear = module.get_submodule(site.linear)
    # momentum None divides by the number of batches seen, a value that fakes do not have; 1.0 stands for it.
    settings = {site.batch_norm: {"momentum": 1.0}}
    shape, dtype = (_ROWS, linear.in_features), linear.weight.dtype
    traced = tracing.trace(module, scanned.reads, shape, dtype, training=training, settings=settings)  # type: ignore[arg-type]
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    if not _is_pattern(traced, site, module.get_submodule(site.batch_norm), training):
        mode = "train" if training else "eval"
        computed = ", ".join(str(node.target) for node in traced.operations)
        return Refusal(KIND, Reason.UNSUPPORTED, f"in {mode} mode, forward computes another function: {computed}")
    return None


def _is_pattern(traced: tracing.Traced, site: _Site, batch_norm: nn.Module, training: bool) -> bool:
    """True when the graph is exactly ``batch_norm(linear(argument, weight, bias) * scale)`` of the site's tensors,
    with each result used once, and in training the count of batches advanced by one where there is one."""
    node_of = {path: node for node, path in traced.inputs.items()}
    nodes = traced.operations
    tracks = bool(training and batch_norm.track_running_stats)
    batches = node_of.get(f"{site.batch_norm}.num_batches_tracked") if tracks else None
    counts = [node for node in nodes if node.target is _aten.add_.Tensor]
    if [(node.args, dict(node.kwargs)) for node in counts] != ([] if batches is None else [((batches, 1), {})]):
        return False
    steps = [node for node in nodes if node not in counts]
    if [node.target for node in steps] != [_aten.linear.default, _aten.mul.Tensor, _aten.batch_norm.default]:
        return False
    linear, product, normalised = steps
    scale = node_of[site.scale]
    bias = node_of.get(f"{site.linear}.bias")
    return (
        _arguments(linear, 3) == (traced.argument, node_of[f"{site.linear}.weight"], bias)
        and product.args in ((linear, scale), (scale, linear))
        and normalised.args[:6] == (product, *_statistics(node_of, site, batch_norm, training))
        and traced.result is normalised
        and all(len(node.users) == 1 and not node.kwargs for node in steps)
    )


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
