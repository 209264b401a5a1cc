"""The convolution of a region when it is called: with the norm folded into it, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.forwards.plain import CONVOLUTIONS, TRANSPOSED, is_bare, is_plain
from normswap.forwards.replaced import Replaced
from normswap.installed import how_called
from normswap.ops.at_once import AtOnce
from normswap.ops.at_once import Convolution as InOneStep
from normswap.ops.dispatch import DTYPES, PLAIN, any_autocast, autocasts, direct_op, lowered_to, needs_grad
from normswap.ops.recorded import laid_out_as
from normswap.regions.activations import activation_of, is_of, numbers_of
from normswap.regions.children import child_at
from normswap.regions.ending import Ending
from normswap.regions.foldings import RELU, is_foldable, takes
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, children_of

_BATCH_NORM_2D = f"{nn.BatchNorm2d.__module__}.{nn.BatchNorm2d.__qualname__}"
_KNOWN = {Tensor, nn.Parameter, type(None)}
_INNER = {cls: Replaced(cls, "_output_padding" if cls in TRANSPOSED else "_conv_forward") for cls in CONVOLUTIONS}
"""The method that a forward calls."""


class _Form:
    """What a norm is asked about before its input is there."""

    def __init__(self, rank: int, channels: int) -> None:
        self.rank, self.shape = rank, (0, channels)

    def dim(self) -> int:
        return self.rank


class Directly:
    """A region of a Conv2d and a BatchNorm2d by one native op, where all is as it mostly is: one look at each thing
    that may have changed. None else; what is to be done then, ``Fused`` finds out."""

    def __init__(self, compiled: Compiled) -> None:
        region = compiled.region
        self.ending = Ending(region) if "behind" in region.attributes else None
        self.convolution, self.norm, self.passes = region.convolution, region.norm, region.passes
        self.children = children_of(region)
        self.acting = region.activation if isinstance(region.activation, str) else ""
        self.activation = region.literal_activation()
        self.way = ops.convolution.WAYS[region.folding]
        self.at = region.step("residual").operand if region.has("residual") else -1
        self.callees, self.called = compiled.callees, compiled.callees()
        self.known: tuple[Any, tuple[int, ...]] = (), ()  # settings as read, and as the op takes them
        self.at_once = AtOnce(self._in_one_step(region) if region.folding == "scaled" else None)

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Tensor | None:
        if any_autocast():  # it would decline
            return None
        site = self.site(children, packed)
        x = packed if self.at < 0 else packed[self.at]
        if site is None or type(x) not in PLAIN or not x.is_cuda or x.is_neg() or not may_run(self.way == 0):
            return None
        op = direct_op("convolution_batch_norm_eval")
        if op is None:
            return None
        (weight, bias, *norm), (*geometry, code, way), (eps, low, high), behind = site
        return self.laid_out(op(x, weight, bias, *geometry, *norm, eps, behind, code, low, high, way), behind)

    def _in_one_step(self, region: Region) -> InOneStep:
        inner = _INNER[nn.Conv2d]
        literal = self.activation
        return InOneStep(
            *(self.convolution, self.norm, self.children, self._stands, (inner.name, inner.function, inner.code)),
            cls=nn.Conv2d,
            passes=tuple(tuple(name.split(".")) for name in self.passes),
            acting=tuple(self.acting.split(".")) if self.acting else None,
            activation_of=numbers_of,
            activation=None if literal is None else (literal.code, literal.low, literal.high),
            callees=self.callees,
            called=self.called,
            place=self.at,
        )

    def _stands(self, norm: Any) -> Any:
        """The forward that the norm is called by, where it is such a norm."""
        if self.ending is not None:
            found = self.ending.read(norm)
            return None if found is None else (*found.known, how_called(type(norm)))
        return (*_NORM.known, how_called(type(norm))) if type(norm) is nn.BatchNorm2d else None

    def laid_out(self, out: Tensor | None, behind: Tensor | None) -> Tensor | None:
        """The result as PyTorch lays it out: after the first operand of a sum."""
        return out if out is None or behind is None or self.at != 1 else laid_out_as(out, behind)

    def given(self, packed: Any, x: Any) -> Any:
        """``packed`` with ``x`` as the input of the convolution."""
        if self.at < 0:
            return x
        return (x, packed[1]) if self.at == 0 else (packed[0], x)

    def site(self, children: Mapping[str, Any], packed: Any) -> tuple[Any, Any, Any, Any] | None:
        """What the op takes beside the input, where ``may_run``: the convolution's tensors and the norm's; geometry,
        activation and way; eps and the activation's parameters; and the residual."""
        convolution, norm = children.get(self.convolution), children.get(self.norm)
        if type(convolution) is not nn.Conv2d:
            return None
        if type(norm) is not nn.BatchNorm2d if self.ending is None else not self.ending.is_of(norm):
            return None
        c, n = convolution.__dict__, norm.__dict__
        if n["training"] or not (is_bare(c) and is_bare(n)) or "_conv_forward" in c:
            return None
        activation = self._activation_of(child_at(children, self.acting)) if self.acting else self.activation
        if activation is None:
            return None
        for name in self.passes:
            passing = child_at(children, name)
            if type(passing) is not nn.Identity or not is_bare(passing.__dict__):
                return None
        if self.callees() != self.called:
            return None
        code, low, high = activation.code, activation.low, activation.high
        settings = c["stride"], c["padding"], c["dilation"], c["groups"], c["padding_mode"], code
        read, numbers = self.known
        if settings != read:
            geometry = _geometry(*settings[:-1])
            numbers = (*geometry, code, self.way) if geometry else ()
            self.known = settings, numbers
        behind = None
        if self.at >= 0 and (behind := packed[1 - self.at]) is None:  # the statements raise
            return None
        own, statistics, affine = c["_parameters"], n["_buffers"], n["_parameters"]
        try:
            kept = statistics["running_mean"], statistics["running_var"], affine["weight"], affine["bias"]
            tensors = own["weight"], own["bias"], *kept
        except KeyError:  # it is kept elsewhere
            return None
        if not numbers or tensors[0] is None or not n["eps"] > 0:
            return None
        if not _KNOWN.issuperset(map(type, (*tensors, behind))):
            return None
        if behind is not None and (behind.is_neg() or (self.at == 1 and not lies_in_a_format(behind))):
            return None  # another sign, or PyTorch's sum lies in another way
        return tensors, numbers, (n["eps"], low, high), behind

    def _activation_of(self, acting: Any) -> Activation | None:
        """That which a child is; None for another one than the op does here."""
        if type(acting) is nn.ReLU:
            return RELU if is_bare(acting.__dict__) else None
        return activation_of(acting) if self.way == ops.convolution.WAYS["scaled"] else None


def lies_in_a_format(tensor: Tensor) -> bool:
    """Whether it is contiguous in a memory format."""
    last = _LAST.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def may_run(by_cudnn: bool) -> bool:
    """Whether the native op may run now, as far as that is no matter of one region."""
    return _calls_what_it_did() and not _has_any_global_hook() and ops.runs_directly(by_cudnn)


def direct_way(compiled: Compiled) -> Directly | None:
    """The short way to run a region, None where the native op does not serve such regions: unless it scales, it ends
    them in a ReLU, which a child may turn out to be, or, as a matrix product, in nothing."""
    region = compiled.region
    served = {
        "scaled": True,
        "fused": torch.bfloat16 in ops.convolution.FUSED and region.literal_activation() in (None, RELU),
        "matmul": region.literal_activation() in (None, NONE, RELU) and not region.has("residual"),
    }
    known = region.type == _BATCH_NORM_2D or "behind" in region.attributes
    known = known and all(is_of(region, function) for function in compiled.callees())
    return Directly(compiled) if known and served.get(region.folding) else None


def _geometry(*settings: Any) -> tuple[int, ...]:
    """Stride, padding and dilation, a number a spatial dim, and groups; nothing of a convolution that pads otherwise or
    gives them otherwise."""
    *pairs, groups, mode = settings
    pairs_of_two = all(type(pair) is tuple and len(pair) == 2 and max(pair) < 1 << 31 for pair in pairs)
    return (*(number for pair in pairs for number in pair), groups) if pairs_of_two and mode == "zeros" else ()


_NORM = Replaced(nn.BatchNorm2d)
_CALLED = Replaced(nn.Conv2d), _INNER[nn.Conv2d], _NORM, Replaced(nn.ReLU), Replaced(nn.Identity)


def _calls_what_it_did() -> bool:
    """Whether calling the children runs what it ran when this was imported."""
    for one in _CALLED:  # noqa: SIM110 a generator costs more
        if not one.is_unchanged():
            return False
    return True


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
        if not ops.folding_serves(self.folding, x, weight) or not takes(
            self.folding, convolution, behind is not None, activation
        ):
            return False
        if behind is None:
            return True
        how = convolution.stride, convolution.padding, convolution.dilation, convolution.groups
        more = convolution.output_padding if type(convolution) in TRANSPOSED else None
        shape = ops.convolved_shape(x, weight, *how, more)
        return behind.dtype is dtype and behind.device == x.device and behind.shape == shape


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


def _learns(x: Tensor, convolution: Any, norm: Any, behind: Any) -> bool:
    return needs_grad(x, convolution.weight, convolution.bias, norm.weight, norm.bias, behind)


def _is_as_read(convolution: Any) -> bool:
    """Whether it is a convolution that a region may hold, and nothing but torch.nn's code runs in a call of it."""
    cls = type(convolution)
    inner = _INNER.get(cls)
    if inner is None or not is_plain(convolution, cls) or inner.name in convolution.__dict__:
        return False
    how = convolution.stride, convolution.padding, convolution.dilation, convolution.output_padding
    are_tuples = all(type(numbers) is tuple for numbers in how)  # a number for every dim, as __init__ makes it
    return convolution.padding_mode == "zeros" and are_tuples and inner.is_unchanged()
