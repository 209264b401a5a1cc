"""Whether the tensors of a file lie in memory as the tensors of a model do: one place for each element."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from normswap.checkpoint.errors import CheckpointError

_CURE = "save copies: {name: tensor.clone() for name, tensor in state.items()}"


def check_layouts(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when elements of a tensor share memory (stride 0 among others), or two tensors overlap.

    Tensors over exactly the same bytes (tied weights) are fine.
    """
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        if shares_memory_within(tensor):
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)} over strides {list(tensor.stride())}: "
                f"its elements share memory; {_CURE}"
            )
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((*_span(tensor), name))
    for found in spans.values():
        _check_spans(path, found)


def shares_memory_within(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor may lie at one place; as in ATen, by the strides alone."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _check_spans(path: Path, spans: list[tuple[int, int, str]]) -> None:
    before = (0, 0, "")
    for span in sorted(spans):
        if span[0] < before[1] and span[:2] != before[:2]:
            raise CheckpointError(f"{path}: {before[2]} and {span[2]} overlap in memory; {_CURE}")
        before = max(before, span, key=lambda s: s[1])
