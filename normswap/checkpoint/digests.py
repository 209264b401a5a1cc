"""A digest per tensor: what tells a flipped bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from normswap.checkpoint.errors import listed

_CHUNK = 64 << 20


def digest(value: Any) -> str:
    """SHA-256, in hexadecimal, over a tensor's dtype, shape and bytes in the order of its elements.

    Another value (a module's extra state) is known by its ``repr``.
    """
    found = hashlib.sha256()
    if not isinstance(value, Tensor):
        found.update(f"{type(value).__name__} {value!r}".encode(errors="replace"))
        return found.hexdigest()
    found.update(f"{value.dtype} {tuple(value.shape)} {value.layout}".encode())
    for part in _parts(value.detach()):
        flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for chunk in flat.split(_CHUNK):
            found.update(chunk.cpu().numpy())
    return found.hexdigest()


def digests(state: Mapping[str, Any], progress: Callable[[int], object] | None = None) -> dict[str, str]:
    """The digest of every entry; ``progress`` is told the bytes of each that is done. Tied ones are read once."""
    seen: dict[int, str] = {}
    found = {}
    for name, value in state.items():
        found[name] = seen[id(value)] if id(value) in seen else digest(value)
        seen[id(value)] = found[name]
        if progress is not None and isinstance(value, Tensor):
            progress(value.nbytes if value.layout is torch.strided else 0)
    return found


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """One line on how digests differ from the expected ones, None when they do not."""
    told = [
        f"{len(names)} {what}: {listed(names)}"
        for what, names in (
            ("missing", [name for name in expected if name not in found]),
            ("more", [name for name in found if name not in expected]),
            ("changed", [name for name in expected if name in found and found[name] != expected[name]]),
        )
        if names
    ]
    return "; ".join(told) or None


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is not torch.strided:
        outer = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from (
            (tensor.crow_indices(), tensor.col_indices())
            if outer
            else (
                tensor.ccol_indices(),
                tensor.row_indices(),
            )
        )
        yield tensor.values()
    elif tensor.is_quantized:
        yield from (tensor.int_repr(), tensor.dequantize())
    else:
        yield tensor
