"""What reaches the regions of a module while their own statements run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from torch import nn

from normswap.forwards.replaced import Replaced
from normswap.plans import Match
from normswap.regions.install import compiled_of, method_of, with_helpers
from normswap.regions.rewrite import Compiled, Helper


class Listener:
    """Listens to the regions that ``match`` names in ``owner``, of the class ``original`` where it is swapped."""

    def __init__(self, owner: nn.Module, original: type[nn.Module], match: Match) -> None:
        self.owner, self.original, self.match = owner, original, match
        self.compiled, self.method = compiled_of(original, match.attributes), method_of(match.attributes)

    def heard(self, compiled: Compiled, owner: Any, packed: Any) -> None:
        """Told of each call of a region, before its statements run on ``packed``."""

    def _helper(self, compiled: Compiled) -> Helper:
        def helper(owner: Any, packed: Any) -> Any:
            self.heard(compiled, owner, packed)
            return compiled.snippet(owner, packed)

        return helper

    def listen(self) -> Callable[[], object]:
        """Listen from now on, until what this gives is called."""
        method = with_helpers(Replaced(self.original, self.method), self.match.attributes, self._helper)
        self.owner.__dict__[self.method] = partial(method, self.owner)
        return lambda: self.owner.__dict__.pop(self.method, None)


class Listens(Protocol):
    """What can listen to a module."""

    def listen(self) -> Callable[[], object]:
        """Listen from now on, until what this gives is called."""


@contextlib.contextmanager
def listening(listeners: Iterable[Listens]) -> Iterator[None]:
    """All of them listen in the block."""
    with contextlib.ExitStack() as stack:
        for one in listeners:
            stack.callback(one.listen())
        yield
