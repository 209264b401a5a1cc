"""What is asked of the arguments of the public calls."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normswap.proof.prove import MODES


def check_model(model: object) -> None:
    """Raise TypeError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{_how_to_make(model)}")


def check_arguments(model: Any, inputs: Any, kwargs: Any, mode: str, on_mismatch: str) -> None:
    """Raise TypeError for example inputs and ValueError for choices of another kind."""
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
    check_choice("validate", mode, MODES)
    check_choice("on_mismatch", on_mismatch, ("rollback", "raise", "warn"))


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
