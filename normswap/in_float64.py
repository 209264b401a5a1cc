"""Run code that casts between float32 and 16 bits in float64: every cast up is lifted, every cast down rounds where
something is computed from it, and ``tensor.dtype`` says what it says in the real run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

CASTS: frozenset[Any] = frozenset(
    (Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double)
)
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class _Role:
    """The dtype that a float64 tensor stands for; ``rounds`` when its values are still to be rounded to it."""

    dtype: torch.dtype
    rounds: bool = False


class Lifted(TorchFunctionMode):
    """While active, float64 tensors behave as the dtypes they stand for: ``roles`` for those given, and for every
    result the dtype that the operation would give. The result of the whole is not rounded, gradients never are."""

    def __init__(self, roles: Mapping[Tensor, torch.dtype]) -> None:
        super().__init__()
        self._roles: Any = WeakIdKeyDictionary()
        for tensor, dtype in roles.items():
            self._roles[tensor] = _Role(dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]  # another object each time
            return self._role(args[0]).dtype
        if func in CASTS:
            return self._cast(func, args, kwargs)
        settled, named = tree_map(self._settled, (args, {k: v for k, v in kwargs.items() if k != "dtype"}))
        result = func(*settled, **named)
        if isinstance(result, Tensor) and result.is_floating_point():
            twins, twin_kwargs = tree_map(self._twin, (args, kwargs))
            self._roles[result] = _Role(func(*twins, **twin_kwargs).dtype)
        return result

    def _role(self, tensor: Tensor) -> _Role:
        return self._roles.get(tensor) or _Role(tensor.dtype)

    def _settled(self, value: Any) -> Any:
        """A tensor with the rounding done that it is due."""
        if isinstance(value, Tensor) and (role := self._role(value)).rounds:
            return Rounded.apply(value, role.dtype)
        return value

    def _twin(self, value: Any) -> Any:
        """A tensor without values of the dtype that ``value`` stands for."""
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=self._role(value).dtype, device="meta")
        return value

    def _example(self, value: Any) -> Any:
        """A tensor without elements of the dtype and device that ``value`` stands for."""
        if isinstance(value, Tensor):
            return torch.empty(0, dtype=self._role(value).dtype, device=value.device)
        return value

    def _cast(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        source = args[0]
        role = self._role(source)
        if role.dtype not in _BITS:
            return func(*args, **kwargs)
        examples, named = tree_map(self._example, (args, kwargs))
        dtype = func(*examples, **named).dtype
        if dtype not in _BITS:
            return func(*tree_map(self._settled, args), **kwargs)
        if dtype is role.dtype:
            return source
        result = self._settled(source).view_as(source)
        self._roles[result] = _Role(dtype, _BITS[dtype] < _BITS[role.dtype] or dtype is torch.float16)
        return result


class Rounded(torch.autograd.Function):
    """Round to a dtype and back; gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def lift(norm: nn.Module, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype]) -> None:
    """From now on ``norm``, which is written by hand and in float64, computes as if its input were of ``dtype`` and its
    tensors of ``dtypes``; what it gives is not rounded."""
    forward = norm.forward

    def lifted(x: Tensor) -> Tensor:
        x = x.view_as(x)
        named = dict((*norm.named_parameters(), *norm.named_buffers()))
        with Lifted({x: dtype, **{named[name]: of for name, of in dtypes.items()}}):
            return forward(x)

    norm.__dict__["forward"] = lifted
