"""The forward of a subclass of a torch.nn norm that computes what its base class does, unless a flag is set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from normswap.forwards import only_argument
from normswap.forwards.replaced import Replaced, at_once_as


def subclass_forward(kind: str, op: Callable[[Tensor, Any], Tensor]) -> Callable[[Replaced, Mapping[str, Any]], Any]:
    """What makes the forward of a norm of this ``kind``, by ``op`` of the input and the norm."""

    def make(replaced: Replaced, attributes: Mapping[str, Any]) -> Callable[..., Tensor]:
        flag, argument = attributes.get("unless"), replaced.argument
        at_once = at_once_as(replaced, kind, unless=flag)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if len(args) == 1 and not kwargs else only_argument(args, kwargs, argument)
            if not torch.compiler.is_compiling():
                out: Tensor | None = at_once.call(self, x)
                if out is not None:
                    return out
            if isinstance(x, Tensor) and replaced.is_on(self) and not (flag and getattr(self, flag)):
                return op(x, self)
            return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

        return forward

    return make
