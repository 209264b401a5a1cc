"""Who computes a call: our kernels or PyTorch, and what every op shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch._functorch.eager_transforms as _eager_transforms
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from normswap import native

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM_BACKWARD = 512
"""The longest dimension other than the last that the kernels differentiate (kMaxDimBackward)."""
LONG_ROW = 65535
"""From this many elements on a row does not fit what Inductor keeps on chip: it reads rows twice, ours once. Measured
in float32: 8.7 ms to 5.7 for layer_norm and rms_norm of 65,536, 13.1 to 5.7 for l1_norm of 65,535; in bfloat16 .59 to
.39 and .55 to .37 for 131,072. At 32,768 the gain of 2 to 5% is less than a neighbour may cost."""
LARGE_GROUP = 2**20
"""The same for groups of a GroupNorm: .57 ms to .38 in float16, .57 to .40 with SiLU behind it, 7.5 to 5.2 in float32.
Those of 25,088 elements, alone .22 to .14, lose in a ResNet, where Inductor fuses activation and addition."""
PLAIN = (Tensor, torch.nn.Parameter)
_native_tried = False

_direct: dict[str, Callable[..., Any]] = {}
_recording: dict[str, Callable[..., Any]] = {}
_native: dict[str, Callable[..., Any]] = {}
_by_node: set[str] = set()
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Cheaper than asking for a kind of device, which most calls then need not."""
_compiling = torch.compiler.is_compiling
_tracing, _transforms = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_requires_grad_allowed = _eager_transforms.enable_inplace_requires_grad
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_Function = TypeVar("_Function", bound=type[torch.autograd.Function])


def recording(name: str) -> Callable[[_Function], _Function]:
    """Decorates the autograd Function that does all of a call of ``name`` that records a gradient, or answers None; it
    takes what the native op of ``direct`` takes. Function.apply itself would ask again for functorch's transforms, and
    its node which of two functions is the backward."""

    def register(function: _Function) -> _Function:
        _recording[name] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
        return function

    return register


def recorded(name: str) -> Callable[..., Any]:
    """The autograd Function that ``direct`` gives where nothing records ``name`` natively."""
    return _recording[name]


def record_natively(names: Iterable[str]) -> None:
    """From now on the native ops of ``direct`` of these names record gradients themselves."""
    _by_node.update(names)


def native_op(name: str) -> Callable[..., Any]:
    """A native op of the row norms' autograd Functions, without the frame of Python around it."""
    found = _native.get(name)
    if found is None:
        found = _native[name] = _frameless(name)
    return found


def direct(name: str, *tensors: Tensor | None, autocast: bool = False) -> Callable[..., Any] | None:
    """What does all of a call of ``name`` in one step - the native op, or where a gradient is to be recorded the
    autograd Function around it - or None when the call must go the general way: the library, which the first call
    loads, is not there, a tensor is no plain one on a GPU, or autocast, a functorch transform, forward-mode AD,
    torch.jit.trace or torch.compile have a say in it. What is returned answers None, for each of its results, where it
    declines. ``autocast``: the caller sees to that."""
    if _compiling():
        return None
    for tensor in tensors:
        if tensor is not None and not (type(tensor) in PLAIN and tensor.is_cuda):
            return None
    if not _direct and not _library_ready():
        return None
    if name in _ALSO_AUTOGRAD and any(tensor is not None and tensor.is_neg() for tensor in tensors):
        return None  # its kernel comes before that is looked at
    if not autocast and any_autocast() and torch.is_autocast_enabled("cuda"):
        return None
    if _tracing() is not None or _transforms() is not None or forward_ad._current_level >= 0:
        return None
    if name in _by_node or not torch.is_grad_enabled():
        return _direct.get(name)
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return _recording.get(name) if name in _direct else None
    return _direct.get(name)


def direct_op(name: str) -> Callable[..., Any] | None:
    """The native op of ``direct`` for a caller that has asked all that it asks; None without the library."""
    return _direct.get(name)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where ``x`` is. What torch offers raises for a device that has none, such as meta."""
    kind = x.device.type
    return any_autocast() and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def lowered_to(x: Tensor) -> torch.dtype | None:
    """The 16-bit dtype that autocast casts ``x``, or its norm, to before a product; None where it does not."""
    if not autocasts(x) or x.dtype is torch.float64:
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def has_rows(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> bool:
    """True for the shape of the weight or, without one, of the input's last dims."""
    shape = input.shape[-len(normalized_shape) :] if weight is None else weight.shape
    return shape == normalized_shape


def native_serves(*tensors: Tensor | None, elements: int = 0, least: int = LONG_ROW) -> bool:
    """True when our kernels can take these tensors: the library is loaded, all are plain CUDA tensors of one
    device and of dtype float32, float16 or bfloat16, and no functorch transform, forward-mode AD or torch.jit.trace
    is active.

    In code that torch.compile makes, only for a statistic over ``least`` ``elements`` or more, without gradients.
    Elsewhere the formula of ``reference`` stands in the graph: Inductor fuses it with what stands around it, which a
    kernel of ours, opaque to it, cuts in two. Alone ours was never slower, but a ResNet-50 with GroupNorm took 6.5 ms
    with ours inside and 4.6 ms without; so it must win by more than its neighbours may cost.
    """
    if compiler_fuses(*tensors, elements=elements, least=least):
        return False
    first = tensors[0]
    if first is None or not first.is_cuda or not _library_ready():
        return False
    device = first.device
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype in DTYPES and type(tensor) in PLAIN and tensor.device == device):
            return False
    if torch.compiler.is_compiling():
        return True
    return autograd_only() and torch._C._get_tracing_state() is None


def compiler_fuses(*tensors: Tensor | None, elements: int, least: int = LONG_ROW) -> bool:
    """True in code that torch.compile makes where ours is not called: see ``native_serves``."""
    return torch.compiler.is_compiling() and (elements < least or needs_grad(*tensors))


def autograd_only() -> bool:
    """True when no functorch transform and no forward-mode AD is active: an autograd Function serves what is left."""
    return _transforms() is None and forward_ad._current_level < 0


def runs_directly() -> bool:
    """Whether a native op may do all of a call, as far as that is no matter of its tensors, of gradients or of
    autocast, which it asks about itself."""
    return (
        autograd_only() and torch._C._get_tracing_state() is None and not torch.are_deterministic_algorithms_enabled()
    )


def _library_ready() -> bool:
    """Load the library on the first CUDA call if optimize() has not done so; never compiles."""
    global _native_tried
    if not _native_tried and not torch.compiler.is_compiling():
        _native_tried = True
        native.load(build=False)
    return native.available()


def _register_fakes() -> None:
    """Most native ops only fill tensors they are given, so their fakes do nothing; the direct ones decline, and so do
    those that record a gradient, which no code that torch.compile makes holds."""
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("normswap::") or not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"):
            continue
        name = full.removeprefix("normswap::")
        returns = len(getattr(torch.ops.normswap, name).default._schema.returns)
        nothing = None if returns < 2 else (None,) * returns
        fake = _BACKWARDS.get(name, lambda *args, answer=nothing, **kwargs: answer)
        torch.library.register_fake(full, fake)
        if name.endswith("_or_none"):
            short, found = name.removesuffix("_or_none"), _frameless(name)
            _direct[short] = _seen_by_modes(found) if short in _ALSO_AUTOGRAD else found


def _frameless(name: str) -> Callable[..., Any]:
    op = getattr(torch.ops.normswap, name).default
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


_ALSO_AUTOGRAD = ("batch_norm_eval", "convolution_batch_norm_eval")
"""The ops whose kernel also serves the dispatcher's key of autograd, past which they would pay for their way."""


def _seen_by_modes(op: Callable[..., Any], quick: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``op`` past autograd's key where there is a TorchDispatchMode, whose key comes behind that; where there is no
    mode at all ``quick``, if there is such a way past the dispatcher."""
    modes, functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    quick = quick or op

    def call(*args: Any) -> Any:
        if modes():
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)
        return op(*args) if functions() else quick(*args)

    return call


def launch_at_once(quick: Mapping[str, Callable[..., Any]]) -> None:
    """From now on ``direct`` gives these ways to launch the ops of these names."""
    for name, call in quick.items():
        _direct[name] = _seen_by_modes(_frameless(f"{name}_or_none"), call)


def _contiguous_if(wanted: bool, like: Tensor | None) -> Tensor | None:
    return torch.empty_like(like, memory_format=torch.contiguous_format) if wanted and like is not None else None


def _layer_norm_backward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    _, input, weight, bias, *_, of_input, of_weight, of_bias, _ = args
    return _contiguous_if(of_input, input), _contiguous_if(of_weight, weight), _contiguous_if(of_bias, bias)


def _rms_norm_backward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    _, input, weight, *_, of_input, of_weight, _ = args
    return _contiguous_if(of_input, input), _contiguous_if(of_weight, weight), None


def _batch_norm_backward_fake(*args: Any) -> tuple[Tensor | None, ...]:
    grad, input, _, _, _, weight, bias, *_ = args
    scale, shift, _, *more = (*args[15:], None, None, 0.0, False, False)[:5]
    if scale is not None and scale.numel() != input.shape[1]:
        scale = input.new_empty(input.shape[1], dtype=torch.float32)
    like = zip((input, weight, bias, grad, scale, shift), (*args[11:15], *more), strict=True)
    return tuple(torch.empty_like(t) if wanted and t is not None else None for t, wanted in like)


_BACKWARDS: Mapping[str, Callable[..., Any]] = {
    "layer_norm_backward": _layer_norm_backward_fake,
    "rms_norm_backward": _rms_norm_backward_fake,
    "l1_norm_backward": lambda _, input, *rest: _contiguous_if(True, input),
    "batch_norm_backward": _batch_norm_backward_fake,
}
"""The backwards that make their gradients, each with its fake."""

native.on_load(_register_fakes)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_to_float(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autocast does to the inputs of PyTorch's float32 ops (layer_norm, group_norm)."""
    if tensors[0] is not None and tensors[0].is_cuda and torch.is_autocast_enabled("cuda"):
        return tuple(t.float() if t is not None and t.dtype in DTYPES else t for t in tensors)
    return tensors


def by_kernels(*grads: Tensor | None) -> bool:
    """True where kernels may make the gradients in a backward of ``grads``: nobody differentiates these again, and no
    vmap over it, functorch's or the older one (is_grads_batched), wants a rule for each op."""
    if torch.is_grad_enabled() or _transforms() is not None:
        return False
    return not any(grad is not None and _is_batched(grad) for grad in grads)


def affine_dtypes_fit(input: Tensor, *parameters: Tensor | None) -> bool:
    """True when weight and bias have one dtype, the input's or float32."""
    given = {t.dtype for t in parameters if t is not None}
    return len(given) <= 1 and given <= {input.dtype, torch.float32}


def reference_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor | None, more: Tensor | None = None
) -> list[Tensor | None]:
    """The gradients of the reference formula, in float32: differentiable where grad mode is on (double backward).
    ``more`` is added to the first tensor's before that is rounded to its dtype; without a ``grad`` it is all."""
    if grad is None:
        return [more, *(None,) * (len(tensors) - 1)]
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        if not create:
            with _requires_grad_allowed(True):  # which a transform of functorch forbids
                tensors = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        # Each by itself: one may be computed from another, as a norm's input from the residual behind it.
        wide = [None if t is None else t.view_as(t).float() for t in tensors]
        wanted = [t for t in wide if t is not None and t.requires_grad]
        settings: Any = {"create_graph": create, "allow_unused": True}
        found = iter(torch.autograd.grad(function(*wide), wanted, grad.float(), **settings) if wanted else ())
    made = [next(found) if t is not None and t.requires_grad else None for t in wide]
    if more is not None:
        made[0] = more if made[0] is None else made[0] + more
    return [g if g is None or t is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True)]


def dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def statistic_along(input: Tensor, dim: int) -> Tensor:
    """An uninitialised float32 value for every position that ``dim`` runs over, contiguous, of extent 1 along it."""
    return input.new_empty([*input.shape[:dim], 1, *input.shape[dim + 1 :]], dtype=torch.float32)


def in_memory_order(function: Callable[[Tensor, int], Tensor], input: Tensor, dim: int) -> Tensor:
    """``function(input, dim)``, elementwise but for a reduction along ``dim``, laid out as elementwise operations on
    ``input`` give it: ``function`` gets the dims from the slowest to the fastest in memory, and ``dim`` among them."""
    dim %= input.dim()
    if input.is_contiguous() or (like := torch.empty_like(input, device="meta")).is_contiguous():
        return function(input, dim)
    strides = like.stride()
    order = sorted(range(input.dim()), key=lambda i: (-strides[i], input.shape[i] == 1))
    return function(input.permute(order), order.index(dim)).permute([order.index(i) for i in range(input.dim())])
