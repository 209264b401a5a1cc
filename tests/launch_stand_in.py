"""What the nodes call in the kernels' library, over PyTorch's ops on a CPU: convolutions with norms behind them and
BatchNorms by running statistics, given as plain data (csrc/abi/calls.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.activation import CODES, Activation


class View(ctypes.Structure):
    _fields_ = (
        *(("data", c_void_p), ("sizes", POINTER(c_int64)), ("strides", POINTER(c_int64))),
        *(("dims", c_int64), ("dtype", c_int32)),
    )

    def tensor(self) -> Tensor | None:
        """The memory itself."""
        if not self.data:
            return None
        sizes, strides = self.sizes[: self.dims], self.strides[: self.dims]
        count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory = (c_float * count).from_address(self.data)
        return torch.frombuffer(memory, dtype=torch.float32).as_strided(sizes, strides)


class ConvolutionCall(ctypes.Structure):
    _fields_ = (
        *(("input", View), ("weight", View), ("residual", View), ("of_channels", View * 5), ("eps", c_double)),
        *(("stride", c_int64 * 2), ("padding", c_int64 * 2), ("dilation", c_int64 * 2), ("groups", c_int64)),
        *(("activation", c_int32), ("low", c_float), ("high", c_float)),
    )

    def computed(self) -> Tensor:
        """By PyTorch's ops, in channels_last."""
        x, weight, residual = self.input.tensor(), self.weight.tensor(), self.residual.tensor()
        var, mean, gain, shift, bias = (view.tensor() for view in self.of_channels)
        assert x is not None and weight is not None
        how = [*self.stride], [*self.padding], [*self.dilation], self.groups
        out = F.batch_norm(F.conv2d(x, weight, bias, *how), mean, var, gain, shift, False, 0.0, self.eps)
        out = Activation([*CODES][self.activation], self.low, self.high)(out if residual is None else out + residual)
        return out.contiguous(memory_format=torch.channels_last)


class BatchNormCall(ctypes.Structure):
    _fields_ = (
        *(("input", View), ("residual", View), ("running_mean", View), ("running_var", View)),
        *(("weight", View), ("bias", View), ("eps", c_double)),
        *(("activation", c_int32), ("low", c_float), ("high", c_float)),
    )

    def computed(self) -> Tensor:
        """By PyTorch's ops."""
        x, residual, *rest = (getattr(self, name).tensor() for name, _ in self._fields_[:6])
        out = F.batch_norm(x, *rest, False, 0.0, self.eps)
        return Activation([*CODES][self.activation], self.low, self.high)(out if residual is None else out + residual)


LAUNCHED: list[str] = []
"""What was launched, in order."""


def _sizes(call: Any, sizes: Any) -> int:
    given = call.contents
    views = (given.input, given.weight, given.residual, *given.of_channels)
    statistics = given.of_channels[0].data and given.of_channels[1].data
    if any(view.data and view.dtype != 0 for view in views) or given.input.dims != 4 or not statistics:
        return 0
    for place, size in enumerate(given.computed().shape):
        sizes[place] = size
    return 1


def _takes(call: Any) -> int:
    views = [getattr(call.contents, name) for name, kind in BatchNormCall._fields_ if kind is View]
    return int(not any(view.data and view.dtype != 0 for view in views))


def _launch(name: str) -> Callable[..., int]:
    def launch(call: Any, out: int, device: int) -> int:
        LAUNCHED.append(name)
        computed = call.contents.computed()
        ctypes.memmove(out, computed.data_ptr(), computed.numel() * 4)
        return 0

    return launch


_FUNCTIONS = (
    ctypes.CFUNCTYPE(c_int32, POINTER(ConvolutionCall), POINTER(c_int64))(_sizes),
    ctypes.CFUNCTYPE(c_int32, POINTER(ConvolutionCall), c_void_p, c_int32)(_launch("convolution")),
    ctypes.CFUNCTYPE(c_int32, POINTER(BatchNormCall))(_takes),
    ctypes.CFUNCTYPE(c_int32, POINTER(BatchNormCall), c_void_p, c_int32)(_launch("batch_norm")),
)
LAUNCHERS = tuple(ctypes.cast(function, c_void_p).value or 0 for function in _FUNCTIONS)
"""Their addresses, as ``normswap.nodes.call_at_once`` takes them."""
