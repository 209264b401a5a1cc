"""The op in place of a norm that is written out as an expression."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from normswap.forwards.rms_norm import outside_autocast
from normswap.kinds import KINDS
from normswap.lifted import CASTS
from normswap.regions.rewrite import Compiled

_PLAIN = (Tensor, nn.Parameter)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_VERDICTS = 256


class Expression:
    """The op of the expression that is the region ``compiled``."""

    def __init__(self, compiled: Compiled) -> None:
        self.kind, self.snippet = KINDS[compiled.region.kind], compiled.snippet
        self.verdicts: dict[Hashable, bool | None] = {}

    def __call__(self, x: Tensor, given: Sequence[Any], packed: Any) -> Tensor | None:
        """What the expression gives for ``packed``, which holds ``x`` and what is ``given`` beside it; None where only
        the expression itself is sure to be right."""
        arguments = given[: len(self.kind.parameters)]
        if not x.is_floating_point() or not all(_fits(value, x) for value in given):
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
        seen, alike = _Seen(), tree_map(_without_values, packed)
        try:
            with torch.autocast(x.device.type, enabled=False), torch.no_grad(), seen:
                result = self.snippet(None, alike)
        except Exception:  # the expression says so itself when it runs
            return None
        dtypes = [dtype for _, dtype in seen.steps]
        wide = len(dtypes)
        while wide and dtypes[wide - 1] is x.dtype is not torch.float32:
            wide -= 1
        if any(dtype is not torch.float32 for dtype in dtypes[:wide]) or result.shape != x.shape:
            return None
        casts = [is_cast for is_cast, _ in seen.steps[wide:]]
        if result.dtype is not x.dtype or x.dtype not in (torch.float32, *_SIXTEEN_BITS):
            return None
        return {(): False, (True,): False, (True, False): True}.get(tuple(casts))


class _Seen(TorchFunctionMode):
    """Notes of every operation whether it is a cast, and what dtype it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[bool, torch.dtype]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.steps.append((func in CASTS, out.dtype))
        return out


def _fits(value: Any, x: Tensor) -> bool:
    return not isinstance(value, Tensor) or (type(value) in _PLAIN and value.device == x.device)


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape, value.stride()
    return type(value), value


def _without_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
