"""The model of a checkpoint, step by step: opened, moved to where it runs, optimized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normswap.checkpoint.construct import load_strictly
from normswap.checkpoint.errors import CheckpointError, MissingError, one_line
from normswap.checkpoint.factory import HERE, PICKLED, build_model
from normswap.checkpoint.hub import open_library
from normswap.checkpoint.reading import Checkpoint, is_config_folder
from normswap.optimize import optimize, report
from normswap.plan import NormswapError
from normswap.report import Report


def factory_for(path: Path, found: Checkpoint) -> str:
    """The factory of a checkpoint that brings its own. Raises CheckpointError when it does not."""
    if found.module is not None:
        return PICKLED
    if is_config_folder(path):
        return HERE
    raise CheckpointError(f"{path}: holds tensors and no model; pass a factory (--model)")


def open_model(
    found: Checkpoint,
    factory: str,
    kwargs: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    *,
    share: bool = False,
) -> nn.Module:
    """The model that a checkpoint belongs to, in eval mode, with its tensors, in ``dtype`` where that is given. With
    ``share`` it may hold on to the checkpoint's own tensors. Raises CheckpointError."""
    as_dtype = None if dtype is None else getattr(torch, dtype)
    if factory.startswith(("timm:", "hf:")):
        return open_library(factory, kwargs or {}, found.state, found.main, as_dtype)
    if factory == PICKLED:
        if found.module is None:
            raise CheckpointError(f"{found.main}: holds no pickled model")
        model = found.module
    else:
        model = build_model(factory, kwargs)
        load_strictly(model, found.state, found.main, share=share)
    return model.eval() if as_dtype is None else model.eval().to(as_dtype)


def usable_device(device: str | torch.device | None) -> torch.device:
    """``device``, or the best there is for None. Raises MissingError when it cannot be used."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # which one depends on the build of torch
        raise MissingError(f"device {str(device)!r} cannot be used here ({one_line(error)})") from error


def ready(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` on ``device``. Raises CheckpointError when it cannot be moved."""
    try:
        return model.to(device)
    except Exception as error:  # out of memory, or the model's own code
        raise CheckpointError(f"{type(model).__name__} cannot be moved to {device} ({one_line(error)})") from error


def moved(values: Any, device: torch.device) -> Any:
    """``values`` with the tensors in it, however deep, on ``device``."""
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def optimized(model: nn.Module, given: tuple[Any, dict[str, Any]], **options: Any) -> tuple[nn.Module, Report]:
    """``model``, swapped in place, and the report, whose plan is what is left after sites that failed were put back.

    Raises CheckpointError when the model's own code fails on the inputs, and what ``optimize`` raises.
    """
    inputs, kwargs = given
    try:
        swapped = optimize(model, inputs, kwargs or None, inplace=True, **options)
    except NormswapError:
        raise
    except Exception as error:  # the model's own code may raise anything on these inputs
        raise CheckpointError(f"{type(model).__name__} could not be optimized: {one_line(error)}") from error
    return swapped, report(swapped)
