"""The model of a checkpoint, step by step: opened, moved to where it runs, optimized."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normswap.checkpoint.errors import CheckpointError, MissingError, one_line
from normswap.checkpoint.factory import HERE, PICKLED, build_filled
from normswap.checkpoint.reading import Checkpoint, is_config_folder
from normswap.modules import site_match
from normswap.optimize import optimize, plan
from normswap.plan import NormswapError, Plan


def factory_for(path: Path, found: Checkpoint) -> str:
    """The factory of a checkpoint that brings its own. Raises CheckpointError when it does not."""
    if found.module is not None:
        return PICKLED
    if is_config_folder(path):
        return HERE
    raise CheckpointError(f"{path}: holds tensors and no model; pass a factory (--model)")


def open_model(found: Checkpoint, factory: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that a checkpoint belongs to, with its tensors. Raises CheckpointError."""
    if factory == PICKLED:
        if found.module is None:
            raise CheckpointError(f"{found.main}: holds no pickled model")
        return found.module
    return build_filled(factory, kwargs or {}, found.state, found.main, found.folder)


def usable_device(device: str | torch.device | None) -> torch.device:
    """``device``, or the best there is for None. Raises MissingError when it cannot be used."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # which one depends on the build of torch
        raise MissingError(f"device {str(device)!r} cannot be used here ({one_line(error)})") from error


def ready(model: nn.Module, device: torch.device, dtype: str | None = None) -> nn.Module:
    """``model`` in eval mode on ``device`` and in ``dtype``. Raises CheckpointError when it cannot be moved."""
    try:
        model = model.eval().to(device)
        return model if dtype is None else model.to(getattr(torch, dtype))
    except Exception as error:  # out of memory, or the model's own code
        raise CheckpointError(f"{type(model).__name__} cannot be moved to {device} ({one_line(error)})") from error


def moved(values: Any, device: torch.device) -> Any:
    """``values`` with the tensors in it, however deep, on ``device``."""
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def optimized(
    model: nn.Module, given: tuple[Any, dict[str, Any]], filters: dict[str, Any], options: dict[str, Any]
) -> tuple[nn.Module, Plan]:
    """``model``, swapped in place, and what of its plan is in it after sites that failed were put back.

    Raises CheckpointError when the model's own code fails on the inputs, and what ``optimize`` raises.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optimize plans, and warns, again
            planned = plan(model, **filters)
        inputs, kwargs = given
        swapped = optimize(model, inputs, kwargs or None, inplace=True, **filters, **options)
    except NormswapError:
        raise
    except Exception as error:  # the model's own code may raise anything on these inputs
        raise CheckpointError(f"{type(model).__name__} could not be optimized: {one_line(error)}") from error
    kept = tuple(swap for swap in planned.swaps if site_match(swapped.get_submodule(swap.site.name)) == swap.match)
    return swapped, Plan(kept, planned.refused)
