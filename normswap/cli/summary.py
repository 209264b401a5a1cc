"""What a bare checkpoint shows without its model: tensors, sizes, dtypes and likely norms."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from normswap.checkpoint.tensors import size_of

_NORM_NAME = re.compile(r"norm|(^|[_\d])(ln|bn|gn|rms)([_\d]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class LikelyNorm:
    """A module that looks like a norm by the names and shapes of its tensors. ``name`` is "" for the root."""

    name: str
    guess: str
    size: int


@dataclass(frozen=True)
class Summary:
    """A checkpoint at a glance; ``size`` in bytes, tied tensors counted under each of their names."""

    tensors: int
    size: int
    dtypes: dict[str, int]
    norms: tuple[LikelyNorm, ...]

    def __str__(self) -> str:
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
        norms = _count(len(self.norms), "likely norm")
        return f"{_count(self.tensors, 'tensor')} ({dtypes}), {_readable(self.size)}, {norms}"


def summarize(tensors: Mapping[str, Tensor]) -> Summary:
    """Count what ``tensors`` holds and guess its norms.

    A module is a likely norm when it has a ``running_mean``, when its weight and bias are vectors of one
    length (no other common layer has a vector for a weight), or when its weight alone is a vector and its name says so.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, leaf = key.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor
    norms = (_likely_norm(name, leaves) for name, leaves in modules.items())
    return Summary(
        len(tensors),
        sum(map(size_of, tensors.values())),
        dict(Counter(str(t.dtype).removeprefix("torch.") for t in tensors.values()).most_common()),
        tuple(norm for norm in norms if norm is not None),
    )


def _likely_norm(name: str, leaves: Mapping[str, Tensor]) -> LikelyNorm | None:
    if (mean := leaves.get("running_mean")) is not None:
        return LikelyNorm(name, "BatchNorm", mean.numel())
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if weight is None or weight.dim() != 1 or weight.numel() < 2:
        return None
    if bias is not None and bias.shape == weight.shape:
        return LikelyNorm(name, "LayerNorm or GroupNorm", weight.numel())
    if bias is None and _NORM_NAME.search(name.rpartition(".")[2]):
        return LikelyNorm(name, "RMSNorm, or LayerNorm without bias", weight.numel())
    return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _readable(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    power = min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
