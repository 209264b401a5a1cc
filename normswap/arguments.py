"""What public calls are given: the model and the inputs it is called with as an example, and what is asked of all."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from normswap.held import Held, ending_in

OnMismatch = Literal["rollback", "raise", "warn"]
OnEmpty = Literal["warn", "raise", "ignore"]
Validate = Literal["auto", "forward", "grad", "off"]


def check_model(model: object) -> None:
    """Raise TypeError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{_how_to_make(model)}")


def check_arguments(model: Any, inputs: Any, kwargs: Any, on_mismatch: str = "rollback", **mode: str) -> None:
    """Raise TypeError for example inputs and ValueError for choices of another kind: of ``mode`` by the name it has."""
    check_model(model)
    if isinstance(inputs, torch.Size):
        raise TypeError(f"example_inputs must be tensors, got a shape; pass torch.randn({', '.join(map(str, inputs))})")
    if inputs is not None and not isinstance(inputs, Tensor | tuple):
        raise TypeError(
            f"example_inputs must be a tensor or a tuple of positional arguments, got {type(inputs).__name__}; "
            f"{_how_to_give(inputs)}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"example_kwargs must be a dict, got {type(kwargs).__name__}")
    for name, value in mode.items():
        check_choice(name, value, get_args(Validate))
    check_choice("on_mismatch", on_mismatch, get_args(OnMismatch))


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError where ``value`` is not one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_speedup(value: object) -> None:
    """Raise ValueError for what is no finite number above 0, or None."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
        raise ValueError(f"min_speedup must be a number above 0, or None to time nothing, got {value!r}")


def _how_to_give(inputs: Any) -> str:
    """How to pass example inputs that are neither a tensor nor a tuple."""
    if isinstance(inputs, Mapping):
        return "pass a dict as example_kwargs"
    if isinstance(inputs, list):
        return "pass tuple(example_inputs), or (example_inputs,) for one argument that is a list"
    if type(inputs).__module__.partition(".")[0] == "numpy":
        return "make a tensor of it: torch.from_numpy(example_inputs)"
    if isinstance(inputs, DataLoader | Iterator):
        return "pass one batch of it: next(iter(example_inputs))"
    return "put a single argument of another kind into a tuple: (argument,)"


def _how_to_make(model: Any) -> str:
    """What to do with something that is given in the place of a model; "" where that is not known."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"; make one: {model.__name__}(...)"
    if isinstance(model, Mapping):
        return "; load_state_dict it into a model first"
    if isinstance(model, torch.export.ExportedProgram):
        return "; optimize the model before exporting it"
    if isinstance(model, types.FunctionType | types.MethodType):
        return "; optimize the modules it calls"
    return ""


class Example:
    """``model`` and what it may be called with; ``run()`` gives what the model, as it was written, makes of copies of
    that, objects without copies being given back what they hold; None where nothing is given or can be run."""

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
        args, kwargs = tree_map_only(Tensor, _twin, (self.args, self.kwargs))
        held = Held()
        held.note(value for value in self._given() if not isinstance(value, Tensor))  # a cache, say
        with (
            ending_in(held.steps),
            uncompiled(),
            torch.set_grad_enabled(torch.is_grad_enabled() or self._differentiates),
        ):
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
    def typical(self) -> Tensor | None:
        """A tensor of the dtype and device that the model computes in."""
        return _first_floating((*self.model.parameters(), *self._given()))

    @property
    def learns(self) -> bool:
        """Whether a parameter or the input requires a gradient."""
        given = _first_floating(self._given())
        return any(t.requires_grad for t in (*self.model.parameters(), given) if t is not None)

    @property
    def devices(self) -> set[torch.device]:
        """Where the model and the inputs are."""
        return {v.device for v in (*self._state(), *self._given()) if isinstance(v, Tensor)}

    def _state(self) -> tuple[Tensor, ...]:
        return (*self.model.parameters(), *self.model.buffers())

    def _given(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs))


def _twin(tensor: Tensor) -> Tensor:
    """A copy, which wants a gradient where ``tensor`` does: a model may differentiate by its input."""
    twin = tensor.detach().clone()
    return twin if twin.is_inference() else twin.requires_grad_(tensor.requires_grad)


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
