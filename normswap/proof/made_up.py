"""Inputs for a region that no example reached."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normswap.kinds import KINDS, NORMS, sample
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import ROLES, Region, parameters_of

_MEANS = (0.0, 1.0, 100.0, 1000.0)


def packed_of(region: Region, roles: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    """What the helper of ``region`` is given for values by role: "x", "before", "behind", "scale", "shift"."""
    packed = roles["x"]
    for step in region.steps:
        if step.does in ROLES:
            pair = (packed, roles[ROLES[step.does]])
            packed = pair if step.operand == 0 else pair[::-1]
        elif step.does == "norm" and region.nodes:
            named = dict(zip(parameters_of(region), arguments, strict=False))
            packed = _packed(region, -1, {**region.constants, **named, "x": packed}, roles["x"].dtype)
    return packed


def _packed(region: Region, index: int, values: dict[str, Any], dtype: torch.dtype) -> Any:
    """What an operation of the norm hands on; what is not among ``values`` is the ``dtype`` that it casts to."""
    given = [
        _packed(region, operand, values, dtype) if isinstance(operand, int) else values.get(operand, dtype)
        for operand in region.nodes[index].operands
        if operand != ""
    ]
    return given[0] if len(given) == 1 else tuple(given)


def made_up(compiled: Compiled, owner: Any, like: Tensor | None) -> Iterator[Any]:
    """Inputs of unit spread about means of 0 to 1000, of the dtype of the norm's parameters or of ``like``."""
    region = compiled.region
    norm = owner._modules.get(region.norm) if region.type else None
    if norm is None and compiled.arguments is None:
        return
    arguments = () if norm is not None else compiled.arguments(owner)  # type: ignore[misc]
    held: Any = owner._modules[region.linear] if region.linear else norm
    given = [*held.parameters()] if norm is not None else [a for a in arguments if isinstance(a, Tensor)]
    parameter = next((p for p in given if p.is_floating_point()), like)
    dtype, device = (torch.float32, torch.device("cpu")) if parameter is None else (parameter.dtype, parameter.device)
    generator = torch.Generator().manual_seed(0)
    shape = _shape(region, norm, arguments)

    def drawn(sizes: tuple[int, ...], mean: float = 0.0) -> Tensor:
        made = torch.randn(sizes, generator=generator, dtype=torch.float64) + mean
        return made.to(device, dtype)

    means: tuple[float, ...] = _MEANS[:1] if region.convolution else _MEANS
    before, shape = _convolved(owner._modules[region.convolution], shape) if region.convolution else (shape, shape)
    if region.linear:
        linear, means = owner._modules[region.linear], _MEANS[:2]
        before, shape = (24, linear.in_features), (24, linear.out_features)
    for mean in means:
        sample = (1 if region.linear else shape[0], *(1,) * (len(shape) - 2), shape[-1])
        roles = {"x": drawn(before, mean), "before": drawn(shape), "behind": drawn(shape)}
        yield packed_of(region, roles | {"scale": drawn(sample), "shift": drawn(sample)}, arguments)


def _convolved(convolution: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of an input of which ``convolution`` makes something of ``shape``, if it is transposed of that or a
    little more; and of what it makes."""
    names = "kernel_size", "stride", "padding", "dilation", "output_padding"
    sizes: list[tuple[int, int]] = []
    for n, *how in zip(shape[2:], *(getattr(convolution, name) for name in names), strict=True):
        k, s, p, d, more = how
        beside = d * (k - 1) + 1 - 2 * p
        if convolution.transposed:
            before = 1 + max(0, -((beside + more - n) // s))
            sizes.append((before, (before - 1) * s + beside + more))
        else:
            sizes.append(((n - 1) * s + beside, n))
    before, after = zip(*sizes, strict=True)
    return (shape[0], convolution.in_channels, *before), (*shape[:2], *after)


def _shape(region: Region, norm: Any, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if norm is None and (kind := KINDS.get(region.kind)) is not None:
        return kind.sample(*arguments)
    if norm is None:
        called = SimpleNamespace(**dict(zip(parameters_of(region), arguments, strict=True)))
        return NORMS[region.kind].sample(called)
    permuted = region.has("permute")
    return (2, *region.match.view(norm).normalized_shape, 6, 5) if permuted else sample(region.match, norm)
