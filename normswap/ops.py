"""The normalisation ops: argument checks, the choice between our kernels and PyTorch's own op, and autograd.

Every op here is differentiable any number of times and accepts what PyTorch's op accepts. Our kernels serve dense CUDA
tensors of float32, float16 and bfloat16 with shapes PyTorch's op would accept; everything else - other dtypes, CPU
tensors, functorch transforms, forward-mode AD, tensor subclasses, bad shapes (whose errors are then PyTorch's own), a
machine without the library - goes to ``reference``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from normswap import native, reference

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_native_tried = False


def native_serves(*tensors: Tensor | None) -> bool:
    """True when our kernels can take these tensors: the library is loaded, all are plain CUDA tensors of one
    device and of dtype float32, float16 or bfloat16, and no functorch transform or forward-mode AD is active."""
    first = tensors[0]
    if first is None or not first.is_cuda or not _library_ready():
        return False
    device = first.device
    for tensor in tensors:
        if tensor is not None and not (
            tensor.dtype in _DTYPES
            and (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
            and tensor.device == device
        ):
            return False
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


def _library_ready() -> bool:
    """Load the library on the first CUDA call if optimize() has not done so; never compiles."""
    global _native_tried
    if not _native_tried and not torch.compiler.is_compiling():
        _native_tried = True
        native.load(build=False)
    return native.available()


def _register_fakes() -> None:
    """Every native op only fills tensors it is given, so its fake does nothing."""
    for name in ("layer_norm", "rms_norm", "l1_norm", "group_norm", "scale_batch_norm", "affine", "fold_linear"):
        torch.library.register_fake(f"normswap::{name}", lambda *args, **kwargs: None)


native.on_load(_register_fakes)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _autocast_to_float(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autocast does to the inputs of PyTorch's float32 ops (layer_norm, group_norm)."""
    if tensors[0] is not None and tensors[0].is_cuda and torch.is_autocast_enabled("cuda"):
        return tuple(t.float() if t is not None and t.dtype in _DTYPES else t for t in tensors)
    return tensors


def _affine_dtypes_fit(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """True when weight and bias have one dtype, the input's or float32."""
    given = {t.dtype for t in (weight, bias) if t is not None}
    return len(given) <= 1 and given <= {input.dtype, torch.float32}


def _mixed(input: Tensor, *affine: Tensor | None) -> bool:
    return any(t is not None and t.dtype != input.dtype for t in affine)


def _reference_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of the reference formula, in float32: differentiable where grad mode is on (double backward)."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        if not create:
            tensors = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        out = function(*(None if t is None else t.float() for t in tensors))
        found = iter(torch.autograd.grad(out, wanted, grad.float(), create_graph=create, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]


# --- layer_norm -------------------------------------------------------------------------------------------------


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the trailing ``normalized_shape`` (Ba et al. 2016), as ``torch.nn.functional``'s.

    ``input`` is (*, *normalized_shape); ``weight`` and ``bias`` have ``normalized_shape`` and the input's dtype or
    float32. Statistics are float32 or better and two-pass. Returns a contiguous tensor of the input's shape and dtype
    (float32 under autocast). Raises what PyTorch's op raises.
    """
    input, weight, bias = _autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape)
    if not (
        native_serves(input, weight, bias)
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and (bias is None or bias.shape == shape)
        and _affine_dtypes_fit(input, weight, bias)
    ):
        return reference.layer_norm(input, list(shape), weight, bias, eps)
    if _needs_grad(input, weight, bias):
        return _LayerNorm.apply(input, weight, bias, shape, eps)
    return _layer_norm_forward(input, weight, bias, shape, eps, None, None)


def _layer_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.layer_norm.default(
        input, _dense(weight), _dense(bias), math.prod(shape), eps, out, mean, rstd, 0
    )
    return out


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _row_statistic(input: Tensor, dims: int) -> Tensor:
    """An uninitialised float32 value per row, in the shape PyTorch's backward expects: (*, 1, ..., 1)."""
    return input.new_empty((*input.shape[: input.dim() - dims], *(1,) * dims), dtype=torch.float32)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, shape: tuple[int, ...], eps: float) -> Tensor:
        mean, rstd = _row_statistic(input, len(shape)), _row_statistic(input, len(shape))
        out = _layer_norm_forward(input, weight, bias, shape, eps, mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or _mixed(input, weight, bias):
            formula = lambda x, w, b: reference.layer_norm(x, list(ctx.shape), w, b, ctx.eps)  # noqa: E731
            return *_reference_gradients(formula, (input, weight, bias), grad), None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        grads = torch.ops.aten.native_layer_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), mean, rstd, weight, bias, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None


# --- rms_norm ---------------------------------------------------------------------------------------------------


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root-mean-square normalisation over the trailing ``normalized_shape`` (Zhang & Sennrich 2019), as
    ``torch.nn.functional.rms_norm``.

    ``eps=None`` means the machine epsilon PyTorch takes. Returns a contiguous tensor of the input's shape and dtype.
    Raises what PyTorch's op raises.
    """
    shape = tuple(normalized_shape)
    if not (
        native_serves(input, weight)
        and len(shape) > 0
        and input.shape[-len(shape) :] == shape
        and (weight is None or weight.shape == shape)
        and _affine_dtypes_fit(input, weight, None)
    ):
        return reference.rms_norm(input, shape, weight, eps)
    epsilon = torch.finfo(torch.float32).eps if eps is None else eps
    if _needs_grad(input, weight):
        return _RMSNorm.apply(input, weight, shape, epsilon)
    return _rms_norm_forward(input, weight, shape, epsilon, None)


def _rms_norm_forward(
    input: Tensor, weight: Tensor | None, shape: tuple[int, ...], eps: float, rstd: Tensor | None
) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.rms_norm.default(input, _dense(weight), math.prod(shape), eps, out, rstd, 0)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, shape: tuple[int, ...], eps: float) -> Tensor:
        rstd = _row_statistic(input, len(shape))
        out = _rms_norm_forward(input, weight, shape, eps, rstd)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() or _mixed(input, weight):
            formula = lambda x, w: reference.rms_norm(x, ctx.shape, w, ctx.eps)  # noqa: E731
            return *_reference_gradients(formula, (input, weight), grad), None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:2]]
        grads = torch.ops.aten._fused_rms_norm_backward(
            grad.contiguous(), input.contiguous(), list(ctx.shape), rstd, weight, needs
        )
        return *(g if n else None for g, n in zip(grads, needs, strict=True)), None, None


# --- l1_norm ----------------------------------------------------------------------------------------------------


def l1_norm(input: Tensor, dim: int = -1) -> Tensor:
    """``input / torch.mean(torch.abs(input), dim=dim, keepdim=True)`` in one pass over memory.

    The mean is rounded to the input's dtype before the division, as the expression does. A row of zeros gives NaN.
    Our kernel serves the last dimension; another ``dim`` is computed by PyTorch.
    """
    if not (native_serves(input) and input.dim() > 0 and dim in (-1, input.dim() - 1) and input.shape[-1] > 0):
        return reference.l1_norm(input, dim)
    if _needs_grad(input):
        return _L1Norm.apply(input)
    return _l1_norm_forward(input, None)


def _l1_norm_forward(input: Tensor, mean_abs: Tensor | None) -> Tensor:
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.l1_norm.default(input, input.shape[-1], out, mean_abs, 0)
    return out


class _L1Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        mean_abs = _row_statistic(input, 1)
        out = _l1_norm_forward(input, mean_abs)
        ctx.save_for_backward(input, mean_abs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With m = mean|x| over the N elements of a row: dx = dy / m - sign(x) sum(dy x) / (N m^2)."""
        input, mean_abs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _reference_gradients(reference.l1_norm, (input,), grad)[0]
        x, dy = input.float(), grad.float()
        shared = (dy * x).mean(-1, keepdim=True) / (mean_abs * mean_abs)
        return (dy / mean_abs).addcmul_(x.sign(), shared, value=-1).to(input.dtype)


# --- group_norm -------------------------------------------------------------------------------------------------


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group normalisation of ``input`` (N, C, *) (Wu & He 2018), as ``torch.nn.functional.group_norm``.

    ``weight`` and ``bias`` are (C,). A channels_last input gives a channels_last output; any other a contiguous one.
    Returns the input's shape and dtype (float32 under autocast). Raises what PyTorch's op raises.
    """
    input, weight, bias = _autocast_to_float(input, weight, bias)  # type: ignore[assignment]
    if not (
        native_serves(input, weight, bias)
        and input.dim() >= 2
        and num_groups > 0
        and input.shape[1] > 0
        and input.shape[1] % num_groups == 0
        and (weight is None or weight.shape == input.shape[1:2])
        and (bias is None or bias.shape == input.shape[1:2])
        and _affine_dtypes_fit(input, weight, bias)
    ):
        return reference.group_norm(input, num_groups, weight, bias, eps)
    if _needs_grad(input, weight, bias):
        return _GroupNorm.apply(input, weight, bias, num_groups, eps)
    return _group_norm_forward(input, weight, bias, num_groups, eps, None, None)


def _channels_last_format(input: Tensor) -> torch.memory_format:
    """The channels_last format of ``input`` if it has one and is not also contiguous, else contiguous_format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(input.dim())
    if wanted is None or input.is_contiguous() or not input.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    return wanted


def _group_norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Tensor:
    layout = _channels_last_format(input)
    input = input.contiguous(memory_format=layout)
    out = torch.empty_like(input, memory_format=layout)
    channels_last = layout is not torch.contiguous_format
    torch.ops.normswap.group_norm.default(
        input, _dense(weight), _dense(bias), num_groups, eps, channels_last, out, mean, rstd, 0
    )
    return out


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Any, bias: Any, num_groups: int, eps: float) -> Tensor:
        mean = input.new_empty((input.shape[0], num_groups), dtype=torch.float32)
        rstd = torch.empty_like(mean)
        out = _group_norm_forward(input, weight, bias, num_groups, eps, mean, rstd)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.num_groups, ctx.eps = num_groups, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            formula = lambda x, w, b: reference.group_norm(x, ctx.num_groups, w, b, ctx.eps)  # noqa: E731
            return *_reference_gradients(formula, (input, weight, bias), grad), None, None
        needs = [bool(n) for n in ctx.needs_input_grad[:3]]
        layout = _channels_last_format(input)
        batch, channels = input.shape[:2]
        # float32 throughout: PyTorch's 16-bit backward wants mean and rstd rounded to 16 bits, which costs accuracy.
        grads = torch.ops.aten.native_group_norm_backward(
            grad.float().contiguous(),
            input.float().contiguous(),
            mean,
            rstd,
            None if weight is None else weight.float(),
            batch,
            channels,
            math.prod(input.shape[2:]),
            ctx.num_groups,
            needs,
        )
        dx, dw, db = (g.to(t.dtype) if n else None for g, t, n in zip(grads, (input, weight, bias), needs, strict=True))
        return None if dx is None else dx.contiguous(memory_format=layout), dw, db, None, None


# --- scale -> BatchNorm -----------------------------------------------------------------------------------------


def scale_batch_norm(
    input: Tensor,
    scale: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm(input * scale, ...)`` for ``input`` (N, C) without storing the product.

    ``scale`` has shape (), (1,), (C,) or (1, C) and the input's dtype. With ``u = scale * input``, batch mean and
    biased variance of ``u`` come from those of ``input``: ``scale * mean`` and ``scale^2 * var`` (Ioffe & Szegedy
    2015 for the rest). In training the running statistics, where given, are updated as PyTorch does (unbiased
    variance). Raises what PyTorch's op raises.
    """
    vectors = (running_mean, running_var, weight, bias)
    if not (
        native_serves(input, scale, *vectors)
        and input.dim() == 2
        and not torch.is_autocast_enabled("cuda")
        and input.shape[0] > (1 if training else 0)
        and input.shape[1] > 0
        and (scale is None or _is_channel_scale(scale, input))
        and all(v is None or v.shape == input.shape[1:] for v in vectors)
        and (training or (running_mean is not None and running_var is not None))
    ):
        return reference.scale_batch_norm(
            input, scale, running_mean, running_var, weight, bias, training, momentum, eps
        )
    if training:
        return _ScaleBatchNorm.apply(input, scale, weight, bias, running_mean, running_var, momentum, eps)
    if _needs_grad(input, scale, weight, bias):
        return reference.scale_batch_norm(input, scale, running_mean, running_var, weight, bias, False, momentum, eps)
    input = input.contiguous()
    out = torch.empty_like(input)
    torch.ops.normswap.affine.default(
        input, _per_channel(scale, input), running_mean, running_var, weight, bias, eps, out
    )
    return out


def _is_channel_scale(scale: Tensor, input: Tensor) -> bool:
    """True when ``input * scale`` scales whole columns of ``input`` (N, C) and keeps its shape and dtype."""
    channels = input.shape[1]
    return scale.dtype == input.dtype and scale.shape in ((), (1,), (channels,), (1, channels))


def _per_channel(scale: Tensor | None, input: Tensor) -> Tensor | None:
    return None if scale is None else scale.reshape(-1).expand(input.shape[1]).contiguous()


class _ScaleBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        scale: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        momentum: float,
        eps: float,
    ) -> Tensor:
        dense = input.contiguous()
        out = torch.empty_like(dense)
        mean = input.new_empty(input.shape[1], dtype=torch.float32)
        rstd = torch.empty_like(mean)
        torch.ops.normswap.scale_batch_norm.default(
            dense, _per_channel(scale, input), weight, bias, eps, momentum, out, mean, rstd, running_mean, running_var
        )
        ctx.save_for_backward(input, scale, weight, bias, mean, rstd)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With z the input, mu its column mean, u = s z and rstd that of u: ``dz = g s rstd (dy - mean(dy) -
        (z - mu) (s rstd)^2 mean(dy (z - mu)))``, ``dg = s rstd A``, ``db = sum(dy)`` and, since u's own mean and
        variance move with s, ``ds = g eps rstd^3 A``, where A = sum(dy (z - mu))."""
        input, scale, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            formula = lambda z, s, w, b: reference.scale_batch_norm(  # noqa: E731
                z, s, None, None, w, b, True, 0.0, ctx.eps
            )
            return *_reference_gradients(formula, (input, scale, weight, bias), grad), None, None, None, None
        rows = input.shape[0]
        dy = grad.float()
        centred = input.float() - mean
        gain = rstd if scale is None else rstd * scale.float().reshape(-1)
        gamma = 1.0 if weight is None else weight.float()
        a, b = (dy * centred).sum(0), dy.sum(0)
        dx = centred.mul_(-gain * gain * a / rows).add_(dy).sub_(b / rows).mul_(gain * gamma)
        ds = None
        if scale is not None and ctx.needs_input_grad[1]:
            ds = _reduce_to(gamma * ctx.eps * rstd**3 * a, scale)
        dw = None if weight is None else (gain * a).to(weight.dtype)
        db = None if bias is None else b.to(bias.dtype)
        return dx.to(input.dtype), ds, dw, db, None, None, None, None


def _reduce_to(grad: Tensor, scale: Tensor) -> Tensor:
    """Sum a (C,) gradient to the shape of a scale that was broadcast to (C,)."""
    return (grad if scale.numel() == grad.numel() else grad.sum()).reshape(scale.shape).to(scale.dtype)


def fold_scale_batch_norm(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The weight (C, K) and bias (C,) of the one Linear that equals Linear -> * scale -> BatchNorm in eval, computed
    in float32 or better and rounded once. Not differentiable. The formula is ``reference.fold_scale_batch_norm``'s.
    """
    tensors = (linear_weight, linear_bias, scale, running_mean, running_var, weight, bias)
    with torch.no_grad():
        if not native_serves(*tensors):
            return reference.fold_scale_batch_norm(*tensors, eps)  # type: ignore[arg-type]
        dense = linear_weight.contiguous()
        folded = torch.empty_like(dense)
        folded_bias = dense.new_empty(dense.shape[0])
        per_channel = None if scale is None else scale.reshape(-1).expand(dense.shape[0]).contiguous()
        torch.ops.normswap.fold_linear.default(
            dense, linear_bias, per_channel, running_mean, running_var, weight, bias, eps, folded, folded_bias
        )
        return folded, folded_bias
