"""What is asked of the arguments of the public calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap import hints
from normswap.proof.prove import MODES


def check_model(model: object) -> None:
    """Raise TypeError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{hints.how_to_make(model)}")


def check_arguments(model: Any, inputs: Any, kwargs: Any, mode: str, on_mismatch: str) -> None:
    """Raise TypeError for example inputs and ValueError for choices of another kind."""
    check_model(model)
    if isinstance(inputs, torch.Size):
        raise TypeError(f"example_inputs must be tensors, got a shape; pass torch.randn({', '.join(map(str, inputs))})")
    if inputs is not None and not isinstance(inputs, Tensor | tuple):
        raise TypeError(
            f"example_inputs must be a tensor or a tuple of positional arguments, got {type(inputs).__name__}; "
            f"{hints.how_to_give(inputs)}"
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
    """Raise ValueError for what is no number above 0, or None."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):  # type: ignore[operator]
        raise ValueError(f"min_speedup must be a number above 0, or None to time nothing, got {value!r}")
