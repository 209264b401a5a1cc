"""The convolution of a region when it is called: with the norm folded into it, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import _has_any_global_hook

from normswap import ops
from normswap.activation import Activation
from normswap.forwards.plain import is_plain
from normswap.forwards.replaced import Replaced, code_of
from normswap.regions.foldings import CONVOLUTIONS, is_foldable
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region

_RELU = Activation("relu")
_INNER = {cls: Replaced(cls, "_conv_forward") for cls in CONVOLUTIONS}


class _Form:
    """What a norm is asked about before its input is there."""

    def __init__(self, rank: int, channels: int) -> None:
        self.rank, self.shape = rank, (0, channels)

    def dim(self) -> int:
        return self.rank


class Directly:
    """A region whose convolution cuDNN fuses, where all is as it mostly is: one look at each thing that may have
    changed, a fold and a convolution. None else; what is to be done then, ``Fused`` finds out."""

    def __init__(self, compiled: Compiled) -> None:
        region = compiled.region
        self.convolution, self.norm, self.passes = region.convolution, region.norm, region.passes
        self.acting = region.activation if isinstance(region.activation, str) else ""
        self.at = region.step("residual").operand if region.has("residual") else -1
        self.callees, self.called = compiled.callees, compiled.callees()

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Tensor | None:
        convolution, norm = children.get(self.convolution), children.get(self.norm)
        if type(convolution) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
            return None
        c, n = convolution.__dict__, norm.__dict__
        if n["training"] or not (_is_bare(c) and _is_bare(n)) or "_conv_forward" in c or _has_any_global_hook():
            return None
        if self.acting and not _is_bare_of(children.get(self.acting), nn.ReLU):
            return None
        if self.passes and not all(_is_bare_of(children.get(name), nn.Identity) for name in self.passes):
            return None
        if self.called and self.callees() != self.called:
            return None
        if not _calls_what_it_did():
            return None
        if c["padding_mode"] != "zeros" or not _are_tuples(c["stride"], c["padding"], c["dilation"]):
            return None
        x, behind = packed, None
        if self.at >= 0:
            x, behind = packed[self.at], packed[1 - self.at]
            if behind is None:  # the statements raise
                return None
        own, buffers, affine = c["_parameters"], n["_buffers"], n["_parameters"]
        try:
            kernel = own["weight"], own["bias"]
            norm_of = buffers["running_mean"], buffers["running_var"], affine["weight"], affine["bias"]
        except KeyError:  # somebody put a tensor that is none in the place of a parameter or buffer
            return None
        how = c["stride"], c["padding"], c["dilation"], c["groups"]
        return ops.fused_convolution(x, *kernel, how, *norm_of, n["eps"], behind)


_CLASSES = nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Identity
_FORWARDS = [cls.forward for cls in _CLASSES]
_CODES = [code_of(forward) for forward in _FORWARDS]
_CONV_FORWARD, _CONV_CODE = nn.Conv2d._conv_forward, code_of(nn.Conv2d._conv_forward)


def _calls_what_it_did() -> bool:
    """Whether calling the children runs what it ran when this was imported."""
    conv, norm, relu, identity = _FORWARDS
    return (
        nn.Conv2d.forward is conv
        and nn.Conv2d._conv_forward is _CONV_FORWARD
        and nn.BatchNorm2d.forward is norm
        and nn.ReLU.forward is relu
        and nn.Identity.forward is identity
        and [forward.__code__ for forward in _FORWARDS] == _CODES
        and _CONV_FORWARD.__code__ is _CONV_CODE
    )


def _is_bare_of(child: Any, cls: type[nn.Module]) -> bool:
    return type(child) is cls and _is_bare(child.__dict__)


def _is_bare(attributes: Mapping[str, Any]) -> bool:
    """Whether nothing of an instance's own is run when it is called."""
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


class Convolved:
    """What computes the convolution of ``region``; ``read`` gives the arguments of its norm."""

    def __init__(self, region: Region, read: Callable[[Any, Any], Any]) -> None:
        self.name, self.folding, self.read = region.convolution, region.folding, read

    def __call__(
        self, children: Mapping[str, Any], norm: Any, x: Tensor, behind: Any, activation: Activation
    ) -> tuple[Any, Any]:
        """(x, the result of the region), (the convolution's output, None) where the norm is not folded into it, or
        (None, None) where only the region's own statements are sure to do the right thing."""
        convolution: Any = children.get(self.name)
        if not _is_as_read(convolution) or not is_foldable(norm):
            return None, None
        is_as_read = self.read(norm, _Form(x.dim(), convolution.out_channels)) is not None
        if not is_as_read or _learns(x, convolution, norm, behind):
            return None, None
        if not self._folds(convolution, norm, x, behind, activation):
            return convolution(x), None
        how = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
        statistics = norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
        given = convolution.weight, convolution.bias, *how, *statistics, activation
        return x, ops.convolution_batch_norm_eval(x, *given, residual=behind, folding=self.folding)

    def serves(self, children: Mapping[str, Any], x: Tensor) -> bool:
        """Whether the way to fold can be had for this input of the convolution here."""
        weight = children[self.name].weight
        return x.dtype is weight.dtype and ops.folding_serves(self.folding, x, weight)

    def _folds(self, convolution: Any, norm: Any, x: Tensor, behind: Any, activation: Activation) -> bool:
        weight, kind = convolution.weight, x.device.type
        if x.dtype is not weight.dtype or x.device != weight.device or x.dim() != weight.dim():
            return False
        if x.shape[1] != convolution.in_channels or not _dtypes_fit(convolution, norm):
            return False
        if torch.is_autocast_enabled(kind) or not ops.folding_serves(self.folding, x, weight):
            return False
        if self.folding == "fused" and activation != _RELU:
            return False
        if behind is None:
            return True
        how = convolution.stride, convolution.padding, convolution.dilation
        return (
            behind.dtype is x.dtype
            and behind.device == x.device
            and behind.shape == ops.convolved_shape(x, weight, *how)
        )


def _dtypes_fit(convolution: Any, norm: Any) -> bool:
    """Whether PyTorch's ops would take these together: a norm's tensors of one dtype, the convolution's or float32."""
    dtype, kept = convolution.weight.dtype, norm.running_mean.dtype
    own = (norm.running_var, norm.weight, norm.bias)
    alike = all(t is None or t.dtype is kept for t in own) and kept in (dtype, torch.float32)
    return alike and (convolution.bias is None or convolution.bias.dtype is dtype)


def _learns(x: Tensor, convolution: Any, norm: Any, behind: Any) -> bool:
    tensors = x, convolution.weight, convolution.bias, norm.weight, norm.bias, behind
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _is_as_read(convolution: Any) -> bool:
    """Whether it is a convolution that a region may hold, and nothing but torch.nn's code runs in a call of it."""
    cls = type(convolution)
    if cls not in CONVOLUTIONS or not is_plain(convolution, cls) or "_conv_forward" in convolution.__dict__:
        return False
    settled: _ConvNd = convolution
    how = settled.stride, settled.padding, settled.dilation
    return settled.padding_mode == "zeros" and _are_tuples(*how) and _INNER[cls].is_unchanged()


def _are_tuples(*values: object) -> bool:
    """Whether each has a number for every dim, as __init__ makes it."""
    return all(type(value) is tuple for value in values)
