"""The forward of a swapped nn.Sequential: runs of consecutive children computed at once, the rest called one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from normswap.forwards.replaced import Replaced

_Forward: TypeAlias = Callable[..., Tensor]
Run: TypeAlias = "tuple[Sequence[str], Callable[[Tensor, Mapping[str, nn.Module | None]], Tensor | None]]"
"""The names of consecutive children, and what computes their result from the input and all children; None where only
calling them one by one is sure to be right."""


def sequential_forward(replaced: Replaced, runs: Sequence[Run]) -> _Forward:
    """The forward to install on a subclass of an nn.Sequential."""
    starts = {names[0]: ([*names], computed) for names, computed in runs}

    def forward(self: nn.Sequential, *args: object, **kwargs: object) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not replaced.is_on(self):
            return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]
        x, names, children = args[0], list(self._modules), self._modules
        position = 0
        while position < len(names):
            parts, computed = starts.get(names[position], ([], None))
            out = None
            if computed is not None and names[position : position + len(parts)] == parts:
                out = computed(x, children)
            x = children[names[position]](x) if out is None else out  # type: ignore[misc]
            position += 1 if out is None else len(parts)
        return x

    return forward
