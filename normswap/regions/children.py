"""The children that a region calls: whether calling them does what it did when it was found, asked on every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from normswap.forwards.plain import is_plain
from normswap.ops.at_once import PASSING


def child_at(children: Mapping[str, Any], path: str) -> Any:
    """The child ``path`` of a module with these ``children``, or of one of these ("bn1.act"); None where none is."""
    name, _, inner = path.partition(".")
    child = children.get(name)
    if not inner or child is None:
        return child
    return None if inner in child.__dict__ else child._modules.get(inner)


def hands_on(child: Any) -> bool:
    """True when calling ``child`` gives back what it is given: an nn.Identity, or a dropout that is off."""
    if type(child) is nn.Identity:
        return is_plain(child, nn.Identity)
    cls = type(child)
    return cls in _DROPOUTS and is_plain(child, cls) and (not child.training or child.p == 0)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
PASSING.update({cls: cls is not nn.Identity for cls in (nn.Identity, *_DROPOUTS)})
