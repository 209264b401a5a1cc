"""The convolution of a region when it is called: with the norm folded into it, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap import ops
from normswap.activation import Activation
from normswap.forwards.plain import CONVOLUTIONS, TRANSPOSED, is_plain
from normswap.forwards.replaced import Replaced
from normswap.installed import how_called
from normswap.ops.at_once import AtOnce
from normswap.ops.at_once import Convolution as InOneStep
from normswap.ops.dispatch import DTYPES, autocasts, autograd_only, lowered_to, needs_grad
from normswap.regions.activations import is_of, numbers_of
from normswap.regions.ending import ending_of
from normswap.regions.foldings import RELU, is_foldable, takes
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, children_of

_BATCH_NORM_2D = f"{nn.BatchNorm2d.__module__}.{nn.BatchNorm2d.__qualname__}"
_NORM = Replaced(nn.BatchNorm2d)
_INNER = {cls: Replaced(cls, "_output_padding" if cls in TRANSPOSED else "_conv_forward") for cls in CONVOLUTIONS}
"""The method that a forward calls."""


class _Form:
    """What a norm is asked about before its input is there."""

    def __init__(self, rank: int, channels: int) -> None:
        self.rank, self.shape = rank, (0, channels)

    def dim(self) -> int:
        return self.rank


def at_once_of_convolution(compiled: Compiled) -> AtOnce:
    """What calls a region of a Conv2d and a BatchNorm2d so, if anything does: one that is scaled, or fused where cuDNN
    fuses all 16 bits. Fused, it ends in a ReLU, which a child may turn out to be."""
    region, callees = compiled.region, compiled.callees
    ends_itself = "behind" in region.attributes
    literal = region.literal_activation()
    fuses = region.folding == "fused" and torch.bfloat16 in ops.convolution.FUSED and literal in (None, RELU)
    known = region.type == _BATCH_NORM_2D or ends_itself
    known = known and all(is_of(region, function) for function in callees())
    if not known or not (fuses or region.folding == "scaled"):
        return AtOnce(None)

    def stands(norm: Any) -> Any:
        """The forward that the norm is called by, where it is such a norm."""
        if ends_itself:
            found = ending_of(region, norm)
            return None if found is None else (*found.known, how_called(type(norm)))
        return (*_NORM.known, how_called(type(norm))) if type(norm) is nn.BatchNorm2d else None

    acting = region.activation if isinstance(region.activation, str) else ""
    return AtOnce(
        InOneStep(
            *(region.convolution, region.norm, children_of(region), stands),
            inner=_INNER[nn.Conv2d].known,
            cls=nn.Conv2d,
            passes=tuple(tuple(name.split(".")) for name in region.passes),
            acting=tuple(acting.split(".")) if acting else None,
            activation_of=numbers_of,
            activation=None if literal is None else (literal.code, literal.low, literal.high),
            callees=callees,
            called=callees(),
            place=region.step("residual").operand if region.has("residual") else -1,
            fuses=fuses,
        )
    )


def lies_in_a_format(tensor: Tensor) -> bool:
    """Whether it is contiguous in a memory format; False under a transform, as vmap does not say it of every format."""
    last = _LAST.get(tensor.dim())
    return autograd_only() and (
        tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))
    )


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
        if not _is_as_read(convolution) or self.read(norm, _Form(x.dim(), convolution.out_channels)) is None:
            return None, None
        if not is_foldable(norm) or _learns(x, convolution, norm, behind):
            return None, None
        if not self._folds(convolution, norm, x, behind, activation):
            return convolution(x), None
        how = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
        statistics = norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps
        given = convolution.weight, convolution.bias, *how, *statistics, activation
        more = {"output_padding": convolution.output_padding} if type(convolution) in TRANSPOSED else {}
        return x, ops.convolution_batch_norm_eval(x, *given, residual=behind, folding=self.folding, **more)

    def serves(self, children: Mapping[str, Any], x: Tensor) -> bool:
        """Whether the way to fold can be had for this input of the convolution here."""
        weight = children[self.name].weight
        return _dtype_of(x, weight) is not None and ops.folding_serves(self.folding, x, weight)

    def _folds(self, convolution: Any, norm: Any, x: Tensor, behind: Any, activation: Activation) -> bool:
        weight = convolution.weight
        dtype = _dtype_of(x, weight)
        if dtype is None or x.device != weight.device or x.dim() != weight.dim():
            return False
        if x.shape[1] != convolution.in_channels or not _fit(convolution, norm, dtype):
            return False
        if not ops.folding_serves(self.folding, x, weight) or not takes(self.folding, convolution, activation):
            return False
        fuses = self.folding == "fused"
        if behind is None and not fuses:
            return True
        if fuses and not _is_sound(convolution):
            return False
        how = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
        more = convolution.output_padding if type(convolution) in TRANSPOSED else None
        shape = ops.convolved_shape(x, weight, *how, more)
        if fuses and min(shape) <= 0:
            return False
        return behind is None or (behind.dtype is dtype and behind.device == x.device and behind.shape == shape)


def _dtype_of(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype in which PyTorch convolves the two; None where it does not, or by ways that are not followed."""
    if autocasts(x):
        return lowered_to(x) if x.dtype in DTYPES and weight.dtype in DTYPES else None
    return x.dtype if x.dtype is weight.dtype else None


def _fit(convolution: Any, norm: Any, dtype: torch.dtype) -> bool:
    """Whether PyTorch's ops would take these together: a norm's vectors of one dtype, that in which is convolved or,
    beside 16 bits, float32; and all of one value a channel, since a fold would spread others."""
    shape, mean, bias, own = (convolution.out_channels,), norm.running_mean, convolution.bias, convolution.weight
    for vector in (mean, norm.running_var, norm.weight, norm.bias):
        if vector is not None and (vector.dtype is not mean.dtype or vector.shape != shape):
            return False
    if bias is not None and (bias.dtype is not own.dtype or bias.shape != shape):
        return False
    transposed = type(convolution) in TRANSPOSED
    channels = own.shape[1] * convolution.groups if transposed else own.shape[0]
    widened = mean.dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16)
    return (mean.dtype is dtype or widened) and channels == convolution.out_channels


def _is_sound(convolution: Any) -> bool:
    """Whether PyTorch takes its numbers together, which cuDNN's op does not ask."""
    weight, groups = convolution.weight, convolution.groups
    if groups < 1 or weight.shape[0] % groups != 0 or convolution.in_channels != weight.shape[1] * groups:
        return False
    return min(convolution.padding) >= 0 and min(*convolution.stride, *convolution.dilation) >= 1  # type: ignore[no-any-return]


def _learns(x: Tensor, convolution: Any, norm: Any, behind: Any) -> bool:
    return needs_grad(x, convolution.weight, convolution.bias, norm.weight, norm.bias, behind)


def _is_as_read(convolution: Any) -> bool:
    """Whether it is a convolution that a region may hold, and nothing but torch.nn's code runs in a call of it."""
    cls = type(convolution)
    inner = _INNER.get(cls)
    if inner is None or not is_plain(convolution, cls) or inner.name in convolution.__dict__:
        return False
    how = convolution.stride, convolution.padding, convolution.dilation, convolution.output_padding
    dims = convolution.weight.dim() - 2
    as_made = all(type(numbers) is tuple and len(numbers) == dims for numbers in how)  # a number for every dim
    return convolution.padding_mode == "zeros" and as_made and inner.is_unchanged()
