"""Where an expression that is a norm rounds, found by a run without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normswap.forwards.rms_norm import outside_autocast
from normswap.in_float64 import CASTS

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rounds_before_weight(run: Callable[[], Tensor], x: Tensor) -> bool | None:
    """Whether what is normalised in ``run``, which makes something like ``x`` of such a tensor, is rounded to the dtype
    of ``x`` before the weight; None where more is rounded, or the result is not like ``x``. Raises what ``run`` does.
    """
    seen = _Seen()
    with outside_autocast(x.device.type), torch.no_grad(), seen:
        result = run()
    if result.shape != x.shape or result.dtype is not x.dtype or x.dtype not in _FLOATS:
        return None
    dtypes = [dtype for _, dtype in seen.steps]
    wide = len(dtypes)
    while wide and dtypes[wide - 1] is x.dtype is not torch.float32:
        wide -= 1
    if any(dtype is not torch.float32 for dtype in dtypes[:wide]):
        return None
    casts = tuple(is_cast for is_cast, _ in seen.steps[wide:])
    return {(): False, (True,): False, (True, False): True}.get(casts)


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
