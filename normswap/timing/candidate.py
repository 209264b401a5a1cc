"""What can be timed and chosen: a part of a model with its original code and ours, on inputs like the recorded ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normswap.proof.whole_model import tensors_in
from normswap.timing.hidden import Function

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Use:
    """One way in which a candidate is called, ``calls`` times in a run of the model.

    ``key`` is all that its time depends on: uses with the same key, of whatever candidate, are timed once.
    ``functions``, within it, gives a call of each code that is timed, the original and ours, on inputs of their own.
    """

    key: Hashable
    calls: int
    device: torch.device
    functions: Callable[[], contextlib.AbstractContextManager[Sequence[Function]]]


@dataclass(frozen=True)
class Candidate:
    """A part of the model that was proved and can be swapped by itself.

    ``overlaps`` names the candidates that cannot be swapped beside it (a fused region names the norms inside it); it is
    enough that one of the two says so. Without ``uses`` there is nothing to time, and it stays swapped.
    """

    name: str
    kind: str
    uses: tuple[Use, ...] = ()
    overlaps: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Code:
    """What computes a candidate's outputs from what it is given, and the parameters it reads."""

    function: Callable[..., Any]
    parameters: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Form:
    """All that is kept of a tensor: enough to make one that is handled alike."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of its first element from a 16-byte boundary, in elements
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Form:
        offset = x.data_ptr() % 16 // x.element_size()
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, x.device, x.requires_grad)

    def made(self) -> Tensor:
        """A tensor of this form, of random values that do not touch the global generators; zeros if not of floats."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.zeros(self.offset + extent, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            memory.normal_(generator=torch.Generator(self.device).manual_seed(0))
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """One call of a candidate: what it was given, tensors by their forms, and the autocast it came under."""

    inputs: tuple[Any, ...]
    structure: TreeSpec = field(compare=False)
    device: torch.device
    autocast: torch.dtype | None

    @classmethod
    def of(cls, given: Any) -> Call | None:
        """None for a call that cannot be made again: an input that is no plain tensor or hashable value, or no tensor
        of floats with elements among them."""
        inputs, structure = tree_flatten(given)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 0]
        if not floats or any(type(tensor) not in _PLAIN for tensor in tensors):
            return None
        if any(not isinstance(value, Hashable) for value in inputs):
            return None
        device = floats[0].device
        forms = tuple(Form.of(value) if isinstance(value, Tensor) else value for value in inputs)
        return cls(forms, structure, device, _autocast(device.type))

    def made(self) -> tuple[Any, ...]:
        """Inputs of these forms."""
        return tuple(value.made() if isinstance(value, Form) else value for value in self.inputs)

    def function(self, code: Code, inputs: Sequence[Any], gradients: bool) -> Function:
        """A call of ``code`` on ``inputs``; with ``gradients`` its backward too, to the inputs and parameters that
        require them."""
        leaves = [self._given(form, value, gradients) for form, value in zip(self.inputs, inputs, strict=True)]
        call = partial(code.function, tree_unflatten(leaves, self.structure))
        if not gradients:
            return call
        wanted = [t for t in (*leaves, *code.parameters) if isinstance(t, Tensor) and t.requires_grad]
        return with_backward(call, wanted)

    @staticmethod
    def _given(form: Any, value: Any, gradients: bool) -> Any:
        if not isinstance(form, Form):
            return value
        return value.detach().requires_grad_(gradients and form.requires_grad)


def _autocast(kind: str) -> torch.dtype | None:
    """The dtype of the present autocast, if there is one."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def with_backward(call: Callable[[], Any], wanted: Sequence[Tensor]) -> Function:
    """``call`` and the gradients of its outputs, for cotangents of ones, to the ``wanted`` tensors; no ``.grad`` is
    touched. Just ``call`` where no output requires a gradient."""

    def forward_and_backward() -> object:
        outputs = [tensor for tensor in tensors_in(call()) if tensor.requires_grad]
        if not outputs or not wanted:
            return outputs
        cotangents = [torch.ones_like(tensor) for tensor in outputs]
        return torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)

    return forward_and_backward


@dataclass
class Recorder:
    """The calls of one candidate in one run of the model, like ones counted together."""

    calls: Counter[Call] = field(default_factory=Counter)

    def add(self, given: Any) -> None:
        """What the candidate was just called with."""
        call = Call.of(given)
        if call is not None:
            self.calls[call] += 1

    def uses(self, key: Hashable, codes: Callable[[], Sequence[Code]], gradients: bool) -> tuple[Use, ...]:
        """Every form of call with its count; ``codes`` makes what is timed, on state of its own, and ``key`` says what
        the time depends on besides the inputs, the autocast and whether gradients are asked for."""
        return tuple(
            Use((key, call, gradients), count, call.device, partial(_functions, call, codes, gradients))
            for call, count in self.calls.most_common()
        )


@contextlib.contextmanager
def _functions(call: Call, codes: Callable[[], Sequence[Code]], gradients: bool) -> Iterator[list[Function]]:
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), _as_called(call):
        made, inputs = codes(), call.made()
        yield [call.function(code, inputs, gradients) for code in made]


@contextlib.contextmanager
def _as_called(call: Call) -> Iterator[None]:
    """On the device and under the autocast of the call."""
    kind = call.device.type
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(call.device))
        stack.enter_context(torch.autocast(kind, call.autocast, enabled=call.autocast is not None))
        yield
