"""What the nodes call in the kernels' library, over PyTorch's ops on a CPU: norms, convolutions with norms behind them
and BatchNorms by running statistics, given as plain data (csrc/abi/calls.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from batch_norm_stand_in import VECTOR
from torch import Tensor

from normswap.activation import CODES, Activation

DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.uint8
OUT, SUM, STATISTICS, SIGNS, WEIGHT, BIAS, SCALE, INPUT_BIAS = range(8)
"""What a call may be asked to fill."""
DECLINED = -1


NO_OPTIONS = (None, None, None, 0, 0.0, 0.0, None)
"""What the native ops of rows have for arguments that are left out."""


def told_with_options(name: str, given: tuple[Any, ...]) -> str:
    """The name of a native op, or where it is given options of rows that with "_with_options" behind it."""
    behind = {"layer_norm": 5, "rms_norm": 6}.get(name, len(given))
    options = any(isinstance(value, Tensor) or value for value in given[behind:])
    return f"{name}_with_options" if options else name


class View(ctypes.Structure):
    _fields_ = (
        *(("data", c_void_p), ("sizes", POINTER(c_int64)), ("strides", POINTER(c_int64))),
        *(("dims", c_int64), ("dtype", c_int32)),
    )

    def tensor(self) -> Tensor | None:
        """The memory itself."""
        return seen(self.data, [*self.sizes[: self.dims]], [*self.strides[: self.dims]], DTYPES[self.dtype])

    def is_known(self) -> bool:
        """Whether it is absent, or of a dtype that the kernels take."""
        return not self.sizes or self.dtype >= 0


def seen(data: Any, sizes: list[int], strides: list[int], kind: torch.dtype) -> Tensor | None:
    """Memory as a tensor; None where there is none."""
    if not data:
        return None
    count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(data)
    return torch.frombuffer(memory, dtype=kind).as_strided(sizes, strides)


class Memory(ctypes.Structure):
    """Of which results are filled."""


Memory._fields_ = (("allocate", ctypes.CFUNCTYPE(c_void_p, POINTER(Memory), c_int32, POINTER(View))),)


def fill(memory: Any, part: int, result: Tensor) -> None:
    """With the result, laid out as that is."""
    sizes, strides = (c_int64 * result.dim())(*result.shape), (c_int64 * result.dim())(*result.stride())
    code = DTYPES.index(result.dtype)
    data = memory.contents.allocate(memory, part, byref(View(None, sizes, strides, result.dim(), code)))
    made = seen(data, [*result.shape], [*result.stride()], result.dtype)
    assert made is not None
    made.copy_(result)


def tensors_of(call: ctypes.Structure) -> list[Tensor | None]:
    """The memory itself of all that it is given."""
    return [getattr(call, name).tensor() for name, kind, *_ in call._fields_ if kind is View]


class RowNormCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("input", "weight", "bias", "residual", "scale", "shift")),
        *(("dims", c_int64), ("eps", c_double), ("weight_offset", c_double), ("kind", c_int32)),
        *(("cast_before_weight", c_int32), ("activation", c_int32), ("low", c_float), ("high", c_float)),
        *(("dtype", c_int32), ("statistics", c_int32)),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        x, weight, bias, *options = tensors_of(self)
        assert x is not None
        name = ("layer_norm", "rms_norm")[self.kind] + ("_recorded" if self.statistics else "")
        how = (self.weight_offset, bool(self.cast_before_weight)) if self.kind else ()
        affine = (weight,) if self.kind else (weight, bias)
        given = x, self.dims, *affine, self.eps, *how
        dtype = () if self.kind else (DTYPES[self.dtype] if self.dtype != self.input.dtype else None,)
        return name, (*given, *options, self.activation, self.low, self.high, *dtype)

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, SUM, STATISTICS


class GroupNormCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("input", "weight", "bias", "residual")),
        *(("num_groups", c_int64), ("eps", c_double), ("activation", c_int32), ("low", c_float), ("high", c_float)),
        *(("dtype", c_int32), ("statistics", c_int32)),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        x, weight, bias, residual = tensors_of(self)
        assert x is not None
        numbers = self.activation, self.low, self.high
        wide = self.dtype != self.input.dtype
        name = "group_norm_recorded" if self.statistics else "group_norm"
        return name, (x, self.num_groups, weight, bias, self.eps, *numbers, residual, wide)

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, STATISTICS


class RowBackwardCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("grad", "input", "weight", "bias", "statistics", "sum_grad")),
        *(("cols", c_int64), ("weight_offset", c_double), ("kind", c_int32), ("cast_before_weight", c_int32)),
        *(("activation", c_int32), ("low", c_float), ("high", c_float)),
        *((name, c_int32) for name in ("of_input", "of_weight", "of_bias", "residual_dtype")),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        grad, x, weight, bias, statistics, sum_grad = tensors_of(self)
        affine = (weight,) if self.kind else (weight, bias)
        how = (self.weight_offset, bool(self.cast_before_weight)) if self.kind else ()
        wanted = (self.of_input, self.of_weight) if self.kind else (self.of_input, self.of_weight, self.of_bias)
        given = grad, x, *affine, statistics, sum_grad, self.cols, *how, self.activation, self.low, self.high
        return ("layer_norm", "rms_norm")[self.kind] + "_backward", (*given, *map(bool, wanted), 0)

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, WEIGHT, BIAS


class GroupBackwardCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("grad", "input", "weight", "bias", "residual", "statistics")),
        *(("num_groups", c_int64), ("activation", c_int32), ("low", c_float), ("high", c_float)),
        *((name, c_int32) for name in ("of_input", "of_weight", "of_bias", "of_residual")),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        wanted = self.of_input, self.of_weight, self.of_bias, self.of_residual
        numbers = self.num_groups, self.activation, self.low, self.high
        return "group_norm_backward_or_none", (*tensors_of(self), *numbers, *map(bool, wanted))

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, WEIGHT, BIAS, SUM


class BatchNormTrainCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("input", "running_mean", "running_var", "weight", "bias")),
        *(("residual", View), ("scale", View), ("input_bias", View), ("batches", c_void_p)),
        *(("momentum", c_double), ("eps", c_double), ("training", c_int32), ("activation", c_int32)),
        *(("low", c_float), ("high", c_float), ("statistics", c_int32)),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        x, mean, var, weight, bias, residual, *before = tensors_of(self)
        batches = seen(self.batches, [], [], torch.int64)
        numbers = bool(self.training), self.momentum, self.eps, residual, self.activation, self.low, self.high
        return "batch_norm_recorded", (x, mean, var, batches, weight, bias, *numbers, *before)

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, STATISTICS, SIGNS


class BatchNormBackwardCall(ctypes.Structure):
    _fields_ = (
        *((name, View) for name in ("grad", "input", "coefficients", "residual", "weight", "bias", "scale")),
        *(("input_bias", View), ("running_mean", View), ("running_var", View), ("signs", c_void_p), ("eps", c_double)),
        *(("training", c_int32), ("activation", c_int32), ("low", c_float), ("high", c_float)),
        *((name, c_int32) for name in ("of_input", "of_weight", "of_bias", "of_residual", "of_scale", "of_input_bias")),
    )

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """The native op that it is, and its arguments."""
        grad, x, coefficients, residual, weight, bias, scale, input_bias, *running = tensors_of(self)
        assert x is not None
        each = VECTOR if x.numel() % VECTOR == 0 else 1
        signs = seen(self.signs, [x.numel() // each], [1], torch.uint8)
        wanted = map(bool, (self.of_input, self.of_weight, self.of_bias, self.of_residual))
        numbers = bool(self.training), self.activation, self.low, self.high, *wanted, scale, input_bias, self.eps
        of = bool(self.of_scale), bool(self.of_input_bias), *running
        return "batch_norm_backward", (grad, x, coefficients, signs, residual, weight, bias, *numbers, *of)

    def parts(self) -> tuple[int, ...]:
        """Where what the op makes belongs."""
        return OUT, WEIGHT, BIAS, SUM, SCALE, INPUT_BIAS


class ConvolutionCall(ctypes.Structure):
    _fields_ = (
        *(("input", View), ("weight", View), ("residual", View), ("of_channels", View * 5), ("eps", c_double)),
        *(("stride", c_int64 * 2), ("padding", c_int64 * 2), ("dilation", c_int64 * 2), ("groups", c_int64)),
        *(("activation", c_int32), ("low", c_float), ("high", c_float), ("residual_first", c_int32)),
    )

    def is_taken(self) -> bool:
        """Whether all is float32, and there are statistics."""
        views = (self.input, self.weight, self.residual, *self.of_channels)
        statistics = self.of_channels[0].data and self.of_channels[1].data
        return all(view.dtype == 0 for view in views if view.data) and self.input.dims == 4 and bool(statistics)

    def computed(self) -> Tensor | None:
        """By PyTorch's ops, in channels_last."""
        x, weight, residual = self.input.tensor(), self.weight.tensor(), self.residual.tensor()
        var, mean, gain, shift, bias = (view.tensor() for view in self.of_channels)
        assert x is not None and weight is not None
        how = [*self.stride], [*self.padding], [*self.dilation], self.groups
        out = F.batch_norm(F.conv2d(x, weight, bias, *how), mean, var, gain, shift, False, 0.0, self.eps)
        out = Activation([*CODES][self.activation], self.low, self.high)(out if residual is None else out + residual)
        out = out.contiguous(memory_format=torch.channels_last)
        apart = self.residual_first and residual is not None and residual.stride() != out.stride()
        return None if apart else out


class BatchNormCall(ctypes.Structure):
    _fields_ = (
        *(("input", View), ("residual", View), ("running_mean", View), ("running_var", View)),
        *(("weight", View), ("bias", View), ("eps", c_double)),
        *(("activation", c_int32), ("low", c_float), ("high", c_float)),
    )

    def is_taken(self) -> bool:
        """Whether all is float32."""
        views = (getattr(self, name) for name, kind in self._fields_ if kind is View)
        return all(view.dtype == 0 for view in views if view.data)

    def computed(self) -> Tensor | None:
        """By PyTorch's ops."""
        x, residual, *rest = (getattr(self, name).tensor() for name, _ in self._fields_[:6])
        out = F.batch_norm(x, *rest, False, 0.0, self.eps)
        return Activation([*CODES][self.activation], self.low, self.high)(out if residual is None else out + residual)


LAUNCHED: list[str] = []
"""What was launched, in order."""


def _launch(name: str, structure: Any) -> Any:
    def launch(call: Any, memory: Any, device: int) -> int:
        out = call.contents.computed() if call.contents.is_taken() else None
        if out is None:
            return DECLINED
        LAUNCHED.append(name)
        fill(memory, OUT, out)
        return 0

    return _function(structure)(launch)


def _function(structure: Any) -> Any:
    return ctypes.CFUNCTYPE(c_int32, POINTER(structure), POINTER(Memory), c_int32)


_OPS: list[Callable[..., Any]] = []


def _launch_norm(structure: Any) -> Any:
    def launch(call: Any, memory: Any, device: int) -> int:
        views = (getattr(call.contents, name) for name, kind in structure._fields_ if kind is View)
        if not _OPS or not all(view.is_known() for view in views) or not call.contents.input.data:
            return DECLINED
        name, given = call.contents.call()
        found = _OPS[0](name, *given)
        made = found if isinstance(found, tuple) else (found,)
        if all(one is None for one in made):
            return DECLINED
        for part, one in zip(call.contents.parts(), made, strict=False):
            if one is not None:
                fill(memory, part, one)
        if apart := getattr(call.contents, "residual_dtype", 0):
            fill(memory, SUM, made[0].to(DTYPES[apart]))
        return 0

    return _function(structure)(launch)


def norms_by(op: Callable[..., Any] | None) -> None:
    """From now on ``op``, of the native op's name and its arguments, computes the norms; None: they are declined."""
    _OPS[:] = [] if op is None else [op]


_NORMS = [_launch_norm(call) for call in (RowNormCall, GroupNormCall, RowBackwardCall, GroupBackwardCall)]
_FIXED = _launch("convolution", ConvolutionCall), _launch("batch_norm", BatchNormCall)
_TRAINED = [_launch_norm(call) for call in (BatchNormTrainCall, BatchNormBackwardCall)]
_ADDRESSES = [ctypes.cast(function, c_void_p).value or 0 for function in (*_NORMS, *_FIXED, *_TRAINED)]
LAUNCHERS = tuple(_ADDRESSES)
"""Their addresses, as ``normswap.nodes.call_at_once`` takes them."""
OF_NORMS = (*_ADDRESSES[: len(_NORMS)], 0, 0, *_ADDRESSES[-len(_TRAINED) :])
"""Those of norms, but for BatchNorms that record no gradient."""
