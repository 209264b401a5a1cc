"""Whether an installed forward may still stand for the one it replaced, asked on every call: its module may have been
put back while somebody holds on to ``module.forward``, and the original's forward may be another one by now."""

from __future__ import annotations

import inspect
from typing import Any


class Replaced:
    """The function ``name`` of the class ``original``, as it was when the class ``installed`` was made for it."""

    def __init__(self, original: Any, name: str = "forward") -> None:
        self.original, self.name = original, name
        self.installed: type = object  # until there is one: whatever asks
        self.function = getattr(original, name)
        self.code = code_of(self.function)

    @property
    def argument(self) -> str:
        """The name of the one input of a function(self, input)."""
        return list(inspect.signature(self.function).parameters)[1]

    def is_on(self, module: object) -> bool:
        """True while ``module`` is swapped by ``installed``, and the original's function and its code are the same."""
        function = getattr(self.original, self.name)
        unchanged = function is self.function and getattr(function, "__code__", None) is self.code
        return unchanged and isinstance(module, self.installed)

    def is_unchanged(self) -> bool:
        """True while the original's function and its code are those that were replaced."""
        function = getattr(self.original, self.name)
        return function is self.function and getattr(function, "__code__", None) is self.code

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What the original's function is now, on these arguments."""
        return getattr(self.original, self.name)(module, *args, **kwargs)


def code_of(function: Any) -> Any:
    """The code of a plain function; None for another callable."""
    return getattr(function, "__code__", None)
