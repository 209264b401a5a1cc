"""A model and the inputs it is called with as an example."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class Example:
    """``model`` and what it may be called with; ``run()`` gives what the model, as it was written, makes of copies of
    that, None where nothing is given or can be run."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.args = (inputs,) if isinstance(inputs, Tensor) else inputs or ()
        self.kwargs = dict(kwargs or {})
        given = inputs is not None or bool(kwargs)
        self.run: Callable[[], Any] | None = self._called if given and self.has_values else None
        self._differentiates = False

    def _called(self) -> Any:
        """With gradients on where the model itself asks for some, of an energy's forces, say."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (self.args, self.kwargs))
        with uncompiled(), torch.set_grad_enabled(torch.is_grad_enabled() or self._differentiates):
            try:
                return self.model(*args, **kwargs)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
        self._differentiates = True
        return self._called()

    @property
    def has_values(self) -> bool:
        """False when a parameter or buffer has no values (meta, or lazy), so that nothing can be run."""
        return not any(torch.nn.parameter.is_lazy(t) or t.is_meta for t in self._state())

    @property
    def input(self) -> Tensor | None:
        """The first floating-point tensor that it is given."""
        return _first_floating(self._given())

    @property
    def typical(self) -> Tensor | None:
        """A tensor of the dtype and device that the model computes in."""
        found = _first_floating(self.model.parameters())
        return self.input if found is None else found

    @property
    def learns(self) -> bool:
        """Whether a parameter or the input requires a gradient."""
        return any(t.requires_grad for t in (*self.model.parameters(), self.input) if t is not None)

    @property
    def devices(self) -> set[torch.device]:
        """Where the model and the inputs are."""
        return {v.device for v in (*self._state(), *self._given()) if isinstance(v, Tensor)}

    def _state(self) -> tuple[Tensor, ...]:
        return (*self.model.parameters(), *self.model.buffers())

    def _given(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs))


def _first_floating(values: Any) -> Tensor | None:
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models and children as they were written: a proof is of the code, and its own must not be traced."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled; loading it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
