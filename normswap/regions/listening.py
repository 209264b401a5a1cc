"""What reaches the regions of a module, or it as one, while its own code runs, and what stands in its place then."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normswap.forwards.replaced import Replaced
from normswap.ops.at_once import Guarded
from normswap.plans import REGION, Match
from normswap.regions.install import compiled_of, make_forward, method_of
from normswap.regions.rewrite import Compiled, Helper
from normswap.regions.sequential import by_itself
from normswap.regions.spec import Region, children_of
from normswap.untouched import detached_copy


class Listener:
    """Listens to a ``module``, of the class ``original`` where it is swapped for ``match``: to the regions named there,
    or to it as a whole, the only one of an ``owner`` that is made for it."""

    def __init__(self, module: nn.Module, original: type[nn.Module], match: Match) -> None:
        self.module, self.original, self.match = module, original, match
        self.owner, self.compiled = module, list[Compiled]()
        if match.kind == REGION:
            self.compiled = compiled_of(original, match.attributes)
        else:
            whole, self.owner = by_itself(module, match)
            self.compiled = [whole]

    def heard(self, compiled: Compiled, packed: Any) -> None:
        """Told of each call of a region, before its statements run on ``packed``."""

    def listen(self) -> Callable[[], object]:
        """Listen from now on, until what this gives is called."""
        if self.match.kind != REGION:
            return self.module.register_forward_pre_hook(self._called, with_kwargs=True).remove
        name = method_of(self.match.attributes)
        replaced = Replaced(self.original, name, whole=False)
        made = make_forward(replaced, self.match.attributes, self._helper, installed=False)
        method = functools.wraps(replaced.function)(made.otherwise if isinstance(made, Guarded) else made)
        self.module.__dict__[name] = types.MethodType(method, self.module)
        return lambda: self.module.__dict__.pop(name, None)

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is not None:
            self.heard(self.compiled[0], x)

    def _helper(self, compiled: Compiled) -> Helper:
        def helper(owner: Any, packed: Any) -> Any:
            self.heard(compiled, packed)
            return compiled.snippet(owner, packed)

        return helper


@contextlib.contextmanager
def listening(listeners: Iterable[Listener]) -> Iterator[None]:
    """All of them listen in the block."""
    with contextlib.ExitStack() as stack:
        for one in listeners:
            stack.callback(one.listen())
        yield


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
