"""The op in place of a norm that is written out as an expression, and where that rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from normswap.forwards.rms_norm import outside_autocast
from normswap.in_float64 import CASTS
from normswap.kinds import KINDS
from normswap.ops.dispatch import DTYPES, PLAIN
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import others_of

_VALUES = (int, float, bool, torch.dtype)
_VERDICTS = 256


class Expression:
    """The op of the expression that is the region ``compiled``."""

    def __init__(self, compiled: Compiled) -> None:
        self.kind, self.snippet = KINDS[compiled.region.kind], compiled.snippet
        given = {operand for node in compiled.region.nodes for operand in node.operands}
        names = (*self.kind.parameters, *others_of(compiled.region))
        self.present = [index for index, name in enumerate(names) if name in given]
        self.verdicts: dict[Hashable, bool | None] = {}

    def __call__(self, x: Tensor, given: Sequence[Any], packed: Any) -> Tensor | None:
        """What the expression gives for ``packed``, which holds ``x`` and what is ``given`` beside it; None where only
        the expression itself is sure to be right."""
        arguments = given[: len(self.kind.parameters)]
        if not x.is_floating_point():
            return None
        for i in self.present:
            if not _fits(given[i], x):
                return None
        if not self.kind.casts:
            return self.kind.call(x, *arguments)
        rounds = self.rounds(x, given, packed)
        if rounds is None:
            return None
        with outside_autocast(x.device.type):
            return self.kind.call(x, *arguments, rounds)

    def rounds(self, x: Tensor, given: Sequence[Any], packed: Any) -> bool | None:
        """Whether what is normalised is rounded before the weight; None where more is rounded, or the result is not
        like ``x``. Found by a run without values, kept for tensors alike."""
        key = (_form(x), *map(_form, given))
        if key not in self.verdicts:
            if len(self.verdicts) >= _VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = self._judged(x, packed)
        return self.verdicts[key]

    def _judged(self, x: Tensor, packed: Any) -> bool | None:
        try:
            with _without_modes():
                alike = tree_map(_without_values, packed)
                return rounds_before_weight(lambda: self.snippet(None, alike), x)
        except (RuntimeError, TypeError, ValueError, IndexError):  # the expression says so itself when it runs
            return None


def _fits(value: Any, x: Tensor) -> bool:
    if isinstance(value, Tensor):
        return type(value) in PLAIN and value.device == x.device
    return type(value) in _VALUES or (type(value) is torch.device and value == x.device)  # it may be moved there


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape, value.stride()
    return type(value), value


def _without_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def rounds_before_weight(run: Callable[[], Tensor], x: Tensor) -> bool | None:
    """Whether what is normalised in ``run``, which makes something like ``x`` of such a tensor, is rounded to the dtype
    of ``x`` before the weight; None where more is rounded, or the result is not like ``x``. Raises what ``run`` does.
    """
    seen = _Seen()
    with outside_autocast(x.device.type), torch.no_grad(), seen:
        result = run()
    if result.shape != x.shape or result.dtype is not x.dtype or x.dtype not in DTYPES:
        return None
    dtypes = [dtype for _, dtype in seen.steps]
    wide = len(dtypes)
    while wide and dtypes[wide - 1] is x.dtype is not torch.float32:
        wide -= 1
    if any(dtype is not torch.float32 for dtype in dtypes[:wide]):
        return None
    casts = tuple(is_cast for is_cast, _ in seen.steps[wide:])
    return {(): False, (True,): False, (True, False): True}.get(casts)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """What runs here is nothing that the modes of others are to see, such as that of selective checkpointing, which
    expects of a second forward what it saw in the first."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(_push_mode, _pop_mode())
        stack.enter_context(_disable_current_modes())
        yield


class _Seen(TorchFunctionMode):
    """Notes of every operation that computes whether it is a cast, and what dtype it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[bool, torch.dtype]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out is not args[0] and not out._is_view():
            self.steps.append((func in CASTS, out.dtype))
        return out
