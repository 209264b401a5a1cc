"""Whether the tensors of a file lie in memory as the tensors of a model do: one place for each element."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from normswap.checkpoint.errors import CheckpointError

_CURE = "save copies: {name: tensor.clone() for name, tensor in state.items()}"
_LARGEST = 1 << 30  # bytes that an expanded tensor may stand for


def check_layouts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when elements of a tensor share memory, or two tensors overlap.

    Tensors over exactly the same bytes (tied weights) are fine, and so is one that was expanded up to 1 GiB.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        own = tensor[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())]
        if shares_memory_within(own) or (own.numel() < tensor.numel() and tensor.nbytes > _LARGEST):
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)} over strides {list(tensor.stride())}: "
                f"its elements share memory; {_CURE}"
            )
        start = int(own.storage_offset()) * own.itemsize
        last = sum(stride * (size - 1) for stride, size in zip(own.stride(), own.shape, strict=True))
        spans.setdefault(own.untyped_storage().data_ptr(), []).append((start, start + (last + 1) * own.itemsize, name))
    for found in spans.values():
        before = (0, 0, "")
        for span in sorted(found):
            if span[0] < before[1] and span[:2] != before[:2]:
                raise CheckpointError(f"{path}: {before[2]} and {span[2]} overlap in memory; {_CURE}")
            before = max(before, span, key=lambda s: s[1])


def shares_memory_within(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor may lie at one place; as in ATen, by the strides alone."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
