"""The parts of a large input on which a region is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap.kinds import Kind, Norm, kind_of
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import parameters_of
from normswap.untouched import detached_copy

# 110 to 190 bytes an element are held while a slice is compared: 290 to 500 MB.
SLICE_ELEMENTS = 5 * 2**19
SLICES = 13


@dataclass(frozen=True)
class Piece:
    """A part of a region's input: the module whose region makes of it its part of the output, and what cuts it out of
    inputs and outputs, whatever else these are."""

    owner: nn.Module
    cut: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Pieces:
    """What is compared: the share of the input covered, and whether what ours gives for each is a part of what it gives
    for all, as it is but for batches."""

    pieces: list[Piece]
    coverage: float = 1.0
    are_parts: bool = False


def pieces_of(compiled: Compiled, owner: nn.Module, packed: Any, slices: int) -> Pieces:
    """All of what a region is given, or the first, the last and some parts between, as large as so many slices."""
    region, x = compiled.region, compiled.unpack(packed)[0]
    kind, most = kind_of(region.match), slices * SLICE_ELEMENTS
    dims = _independent_dims(compiled, owner, packed)
    are_parts = bool(dims) and not kind.batched
    if not dims and not region.type and isinstance(kind, Kind) and x.dim() > 1:
        dims = [0]  # a part is an input like any other
    dim = max(dims, key=lambda d: x.shape[d], default=0)
    size = x.shape[dim] if dims else 1
    sample = x.numel() // max(1, size)
    if region.linear:
        sample = max(sample, owner.get_submodule(region.linear).out_features)  # type: ignore[arg-type]
    if not dims or size * sample <= SLICE_ELEMENTS:
        return Pieces([Piece(owner)])
    if sample > SLICE_ELEMENTS and _has_groups(compiled, packed):
        return _groups(compiled, owner, x, sample, most)
    least = 2 if kind.batched else 1  # a batch has two rows
    width = min(size, max(least, SLICE_ELEMENTS // sample))
    starts = spread(size, width, max(1, most // (width * sample)))
    cuts = [partial(_narrowed, like=x, dim=dim, start=start, length=width) for start in starts]
    return Pieces([Piece(owner, cut) for cut in cuts], min(1.0, len(cuts) * width / size), are_parts)


def _independent_dims(compiled: Compiled, owner: nn.Module, packed: Any) -> list[int]:
    """The dims of a region's first input along which an element's result does not depend on other samples; for a
    BatchNorm, of whose batch a part is a batch too, the batch."""
    region, (x, *_, arguments) = compiled.region, compiled.unpack(packed)
    kind, norm = kind_of(region.match), owner._modules.get(region.norm) if region.type else None
    given = dict(zip(parameters_of(region), arguments, strict=False))
    if x.dim() == 0:
        return []
    if region.convolution or region.linear:
        return [0]
    if isinstance(kind, Kind):
        dim = given.get("dim") if norm is None else region.match.value(norm, "dim")
        return [d for d in range(x.dim()) if d != dim % x.dim()] if type(dim) is int else []
    if region.has("permute"):
        return [0, 2, 3]
    if kind.rows:
        shape = given["normalized_shape"] if norm is None else region.match.view(norm).normalized_shape
        return list(range(x.dim() - len(shape)))
    unbatched = getattr(norm, "_get_no_batch_dim", None)
    return [] if unbatched is not None and x.dim() == unbatched() else [0]


def _has_groups(compiled: Compiled, packed: Any) -> bool:
    """Whether a sample consists of groups of channels, or channels, that nothing mixes."""
    region, kind = compiled.region, kind_of(compiled.region.match)
    grouped = isinstance(kind, Norm) and not kind.rows and not kind.batched and bool(region.type)
    shapes = {t.shape for t in tree_leaves(packed) if isinstance(t, Tensor)}
    return grouped and not region.match.registered and len(shapes) == 1


def _groups(compiled: Compiled, owner: nn.Module, x: Tensor, sample: int, most: int) -> Pieces:
    """The pieces of samples that are too large as a whole: some groups of one sample each; of an InstanceNorm, some
    channels."""
    name = compiled.region.norm
    module: Any = owner._modules[name]
    groups = getattr(module, "num_groups", x.shape[1])
    channels = x.shape[1] // groups
    width = min(groups, max(1, SLICE_ELEMENTS * groups // sample))
    firsts = spread(groups, width, groups)
    found = []
    for place in spread(len(x) * len(firsts), 1, max(1, most * groups // (width * sample))):
        row, first = place // len(firsts), firsts[place % len(firsts)]
        norm: Any = detached_copy(module, type(module))
        sizes = {"num_groups": width, "num_channels": width * channels, "num_features": width}
        norm.__dict__.update({name: size for name, size in sizes.items() if name in norm.__dict__})
        along = slice(first * channels, (first + width) * channels)
        for key, parameter in norm._parameters.items():
            if parameter is not None:
                norm._parameters[key] = nn.Parameter(parameter.detach()[along], parameter.requires_grad)
        part = nn.Module()
        part._modules = {**owner._modules, name: norm}
        found.append(Piece(part, partial(_indexed, where=(slice(row, row + 1), along))))
    return Pieces(found, min(1.0, len(found) * width / (len(x) * groups)), are_parts=True)


def _narrowed(value: Any, like: Tensor, dim: int, start: int, length: int) -> Any:
    """``value``, of a tensor that has a sample for each of ``like``, as they broadcast, those from ``start`` on."""
    back = dim - like.dim()
    along = isinstance(value, Tensor) and value.dim() >= -back and value.shape[back] == like.shape[dim]
    return torch.narrow(value, back, start, length) if along else value


def _indexed(value: Any, where: tuple[slice, ...]) -> Any:
    return value[where] if isinstance(value, Tensor) else value


def spread(size: int, width: int, most: int) -> list[int]:
    """At most ``most`` starts of ``width`` out of ``size``, the first and the last among them."""
    count = min(-(-size // width), most)
    return sorted({round(i * (size - width) / max(1, count - 1)) for i in range(count)})
