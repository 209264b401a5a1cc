"""What runs in place of a region: one op where everything is as it was when the region was found, else the region's
own statements. Parameters, flags and children are read anew on every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from normswap.forwards.batch_norm import RANKS
from normswap.forwards.norm import registered_arguments
from normswap.forwards.plain import is_unhooked
from normswap.forwards.replaced import Replaced, is_as_read
from normswap.forwards.rms_norm import arguments_reader, in_one_step, stood_for
from normswap.installed import called_class, how_called, is_called_as
from normswap.kinds import KINDS, NORMS
from normswap.ops.at_once import NAMES, AtOnce, Norm
from normswap.ops.dispatch import PLAIN, lowered_to
from normswap.ops.recorded import laid_out_as
from normswap.ops.rows import can_add
from normswap.plans import Match
from normswap.regions.activations import activation_of, is_of, numbers_of
from normswap.regions.children import child_at, hands_on
from normswap.regions.convolution import Convolved, at_once_of_convolution, lies_in_a_format
from normswap.regions.ending import is_behind
from normswap.regions.expression import Expression
from normswap.regions.feeds import only_multiplies
from normswap.regions.foldings import is_foldable
from normswap.regions.projected import Projected
from normswap.regions.rewrite import Compiled, Helper
from normswap.regions.spec import Region, children_of, qualified

_Arguments: TypeAlias = "tuple[Any, ...] | None"
"""What an op takes behind its input; None where only the module itself is sure to do the right thing."""
_Reader: TypeAlias = Callable[[Any, Tensor], _Arguments]


def make_helper(compiled: Compiled) -> Helper:
    """``helper(self, packed)`` for the rewritten forward."""
    fused, snippet, compiling = Fused(compiled), compiled.snippet, torch.compiler.is_compiling
    inner_of, at_once = compiled.inner if compiled.views else None, fused.at_once
    children, in_one_step = children_of(compiled.region), at_once.norm is not None
    seen = compiled.region.seen  # then its gradient must be all there is, and the op's two results have each its own

    def helper(self: Any, packed: Any) -> Any:
        if compiling():  # the compiler fuses the statements themselves
            return snippet(self, packed)
        if seen and torch.is_grad_enabled():
            return snippet(self, packed)
        inner = packed
        if inner_of is not None:
            inner = inner_of(packed)
            if inner is None:
                return snippet(self, packed)
        if in_one_step:
            out = at_once.call(self, inner)
            if out is not None:
                return out
        own = self.__dict__
        for name in children:
            if name in own:  # it hides the child
                return snippet(self, packed)
        out = fused(own["_modules"], inner)
        return snippet(self, packed) if out is None else out

    return helper


class Fused:
    """The op of a region: None where it declines. It runs on every call: what the op itself asks of its tensors, and
    declines, is not asked here first. ``at_once``: what calls it in one step, of (owner, packed), if anything does."""

    def __init__(self, compiled: Compiled) -> None:
        region = compiled.region
        self.unpack, self.region = compiled.unpack, region
        self.shared, self.passes = region.shared, region.passes
        self.child = region.norm
        self.activation = region.literal_activation()
        self.sums, self.behind = region.has("sum"), region.has("residual")
        self.scaled = region.has("gain")
        self.leads = region.has("residual") and region.step("residual").operand == 1
        self.acting: Any = region.activation  # a child, where it is no literal
        self.expression = Expression(compiled) if region.kind in KINDS else None
        self.call = _op_of(region)
        read = _reader(region)
        self.read = read if region.type else None
        self.convolved = Convolved(region, read) if region.convolution else None
        self.feeds = region.feeds
        self.callees, self.called = compiled.callees, compiled.callees()
        self.known = all(is_of(region, function) for function in self.called)
        self.projected = None
        if region.linear and self.known:
            self.projected = Projected(compiled, _is_batch_norm_1d, self._of_linear)
        self.at_once = AtOnce(None)
        if self.convolved is not None:
            self.at_once = at_once_of_convolution(compiled)
        elif self.known:
            self.at_once = at_once_of(compiled, self.dtype)

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        if self.projected is not None:
            return self.projected(children, packed)
        x, before, behind, scale, shift, arguments = self.unpack(packed)
        # Somebody may have put another function in the place of one that is called.
        if type(x) not in PLAIN or x.is_nested or not self.known or self.callees() != self.called:
            return None
        if self.expression is not None:
            return self.expression(x, arguments, packed)
        if self.sums and not _is_beside(x, before):
            return None
        if (self.behind and behind is None) or (self.scaled and scale is None):  # the statements raise
            return None
        for name in self.passes:
            if not hands_on(child_at(children, name)):
                return None
        activation = self.activation or activation_of(child_at(children, self.acting))
        if activation is None:
            return None
        total = None
        if before is not None and not can_add(x, before) and can_add(before, x):
            both = x.shape == before.shape and x.is_contiguous() and before.is_contiguous()
            x, before = (before, x) if both else (x, before)  # the sum is the same
        if before is not None and (before.shape != x.shape or not can_add(x, before)):  # it broadcasts, say
            if before.dtype is x.dtype and self.shared and torch.is_grad_enabled():  # the op adds its gradients
                x, before = torch.broadcast_tensors(x, before)
            else:
                x = total = x + before
                before = None
        if self.read is not None:
            norm = children.get(self.child)
            if norm is None or not is_unhooked(norm):
                return None
            if self.convolved is not None:
                if self.behind and (type(behind) not in PLAIN or (self.leads and not lies_in_a_format(behind))):
                    return None
                x, out = self.convolved(children, norm, x, behind, activation)
                if x is None:
                    return None
                if out is not None:
                    return laid_out_as(out, behind) if self.leads else out
            arguments = self.read(norm, x)
            if arguments is None:
                return None
        if self.leads and not _lies_as(behind, x):
            return None
        dtype = self.dtype(children, x)
        out = self.call(x, arguments, before, behind, scale, shift, activation, dtype)
        if out is None:
            return None
        if before is not None:
            out, total = out
        return (total, out) if self.shared else out

    def _of_linear(self, norm: Any, x: Tensor, behind: Any, activation: Any) -> Any:
        """The norm of what a Linear gave."""
        arguments = self.read(norm, x) if self.read is not None else None
        return None if arguments is None else self.call(x, arguments, None, behind, None, None, activation, None)

    def dtype(self, children: Mapping[str, Any], x: Tensor) -> torch.dtype | None:
        """The dtype of the result where nobody sees it before autocast has cast it to that."""
        if not self.feeds or (dtype := lowered_to(x)) is None:
            return None
        *passes, last = self.feeds
        alone = all(hands_on(children.get(name)) for name in passes)
        return dtype if alone and only_multiplies(children.get(last)) else None


def _op_of(region: Region) -> Callable[..., Any]:
    norm = NORMS.get(region.match.kind)
    return (norm and (norm.permuted if region.has("permute") else norm.fused)) or _declines


def _is_beside(x: Tensor, other: Any) -> bool:
    return type(other) in PLAIN and other.device == x.device


def _lies_as(leading: Any, x: Tensor) -> bool:
    """Whether ``leading``, the first operand of a sum, after which PyTorch lays out the result, lies as the norm of
    ``x`` does, after which ours does."""
    return type(leading) in PLAIN and leading.stride() == x.stride() and lies_in_a_format(x)


# --- the norm that is a child -------------------------------------------------------------------------------------


def _reader(region: Region) -> _Reader:
    """What gives the arguments of the op from the child that is the norm, whatever its class is by now."""
    readers: dict[type[nn.Module], tuple[_Reader, tuple[Any, Any]]] = {}

    def read(child: Any, x: Tensor) -> _Arguments:
        cls = type(child)
        if cls not in readers:
            original = called_class(child)
            known = original is not None and qualified(original) == region.type
            readers[cls] = (_reader_of(original, region.match) if known else _declines), how_called(cls)
        reader, called = readers[cls]
        return reader(child, x) if is_called_as(called, cls) else None

    return read


def _declines(*_: Any) -> None:
    return None


# As they were when this was imported: a region may first be run when somebody has put another forward on the class.
_TORCHS = {cls: Replaced(cls) for norm in NORMS.values() for cls in norm.classes}


def _is_batch_norm_1d(norm: Any) -> bool:
    is_it = type(norm) is nn.BatchNorm1d or (norm is not None and called_class(norm) is nn.BatchNorm1d)
    return is_it and _TORCHS[nn.BatchNorm1d].is_unchanged() and is_unhooked(norm)


def _reader_of(cls: Any, match: Match) -> _Reader:
    original = _TORCHS.get(cls) or Replaced(cls)
    if match.by_hand:
        return arguments_reader(original, match.attributes)
    if match.registered:
        arguments: _Reader = registered_arguments(match.kind, match.attributes)
    elif issubclass(cls, NORMS[match.kind].classes):
        arguments = NORMS[match.kind].arguments
    else:
        return _declines
    behind, flag = match.attributes.get("behind"), match.attributes.get("unless")
    if behind is not None and not is_behind(cls, behind):
        return _declines
    if behind is None and not match.registered and not is_as_read(original.function, match.attributes):
        return _declines

    def read(child: Any, x: Tensor) -> _Arguments:
        if not original.is_unchanged() or (flag and getattr(child, flag)):
            return None
        if behind is not None and not is_foldable(child):  # its forward is known in eval alone
            return None
        return arguments(child, x)

    return read


_KINDS: Mapping[str, tuple[type[nn.Module], set[str]]] = {
    "layer_norm": (nn.LayerNorm, {"sum", "gain", "shift"}),
    "rms_norm": (nn.RMSNorm, {"sum", "gain", "shift"}),
    "group_norm": (nn.GroupNorm, {"residual"}),
    "batch_norm": (nn.modules.batchnorm._BatchNorm, {"residual"}),
}
"""The class, and the steps that the native op has besides the norm."""
_RANKS = {qualified(cls): ranks for cls, ranks in RANKS.items()}
_Dtype = Callable[[Mapping[str, Any], Tensor], torch.dtype | None]


def at_once_of(compiled: Compiled, dtype: _Dtype) -> AtOnce:
    """What calls the region so, if anything does. ``dtype``: that of the result where nobody sees it before autocast
    has cast it to that."""
    region = compiled.region
    if region.kind in KINDS:
        return _at_once_of_expression(compiled)
    cls, steps = _KINDS.get(region.kind, (nn.Module, set[str]()))
    does = {step.does for step in region.steps}
    by_hand = region.match.by_hand
    more = does - steps - {"norm", "pass", "activation"}
    if not by_hand:
        more |= {*region.attributes} - {"source", "unless"}
    fields = in_one_step(region.attributes) if by_hand else {"names": NAMES.get(region.kind)}
    if region.kind not in _KINDS or more or fields is None:
        return AtOnce(None)
    if region.kind == "batch_norm":
        if region.type not in _RANKS:
            return AtOnce(None)
        fields = {"names": ((_RANKS[region.type],), *NAMES[region.kind])}

    def stands(module: Any) -> Any:
        of: Any = None if module is None else called_class(module)
        if of is None:  # calling it raises, or does something else
            return None
        if by_hand:
            is_it = qualified(of) == region.type
            return stood_for(Replaced(of), region.attributes, how_called(type(module))) if is_it else None
        plain = issubclass(of, cls) and of.__getattribute__ is object.__getattribute__
        plain = plain and is_as_read(of.forward, region.attributes)
        if not plain or qualified(of) != region.type:
            return None
        return *(_TORCHS.get(of) or Replaced(of)).known, how_called(type(module))

    literal = region.literal_activation()
    packs = bool(does & {"residual", "gain", "shift"}) or not region.type
    numbers = None if literal is None else (literal.code, literal.low, literal.high)
    return AtOnce(
        Norm(
            *(region.kind, stands, region.attributes.get("unless")),
            **fields,
            child=region.norm if region.type else None,
            children=children_of(region),
            unpack=compiled.unpack if packs else None,
            position=region.step("sum").operand if "sum" in does else -1,
            lowered=dtype if region.feeds else None,
            passes=region.passes,
            acting=None if numbers else str(region.activation),
            activation_of=numbers_of,
            activation=numbers or (0, 0.0, 0.0),
            callees=compiled.callees,
            called=compiled.callees(),
            region=True,
            shared=region.shared,
            needs_behind="residual" in does,
            needs_scale="gain" in does,
        )
    )


def _at_once_of_expression(compiled: Compiled) -> AtOnce:
    """What calls the op of a norm that is written out so, if it is a native one."""
    kind = KINDS[compiled.region.kind]
    if kind.native is None:
        return AtOnce(None)
    name, arguments_of = kind.native
    unpack, count = compiled.unpack, len(kind.parameters)

    def unpacked(packed: Any) -> tuple[Any, ...]:
        x, *others, given = unpack(packed)
        served = type(x) in PLAIN and not torch.is_autocast_enabled(x.device.type)  # which the op's dtype follows
        return x, *others, (arguments_of(x, *given[:count]) if served else None) or ()

    return AtOnce(Norm(name, unpack=unpacked, callees=compiled.callees, called=compiled.callees(), region=True))
