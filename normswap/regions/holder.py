"""A module in the place of one with regions, that holds copies of what they call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normswap.regions.spec import Region, children_of
from normswap.untouched import detached_copy


def holder_of(region: Region, owner: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A module that stands for ``owner`` in the snippet of ``region``: it holds copies of the children called there,
    which share parameters unless ``dtype`` converts them."""
    holder = nn.Module()
    for name in (*children_of(region), *region.feeds):
        child = owner._modules[name]
        if child is not None:
            holder._modules[name] = made = detached_copy(child, type(child), dtype)
            # Is not called, or listened to itself: as it will be once all is proved.
            if name in region.feeds or (name == region.norm and "behind" in region.attributes):
                made.__dict__.pop("forward", None)
    return holder
