"""A checkpoint without the BatchNorms that fold into a Linear, proved in float64."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normswap.checkpoint.errors import CheckpointError, one_line
from normswap.checkpoint.reading import Checkpoint
from normswap.fold import fold as public_fold
from normswap.plan import MismatchError, NormswapError
from normswap.report import Report

_LIMIT = 1e-9  # of the largest output, in float64, where rounding moves a deep model by 1e-13 or so


def fold(model: nn.Module) -> nn.Module:
    """``normswap.fold(model)``. Raises what that does, and CheckpointError where the model's own code fails."""
    try:
        return public_fold(model.eval())
    except NormswapError:
        raise
    except Exception as error:  # the model's own code may raise anything
        raise CheckpointError(f"{type(model).__name__} cannot be folded: {one_line(error)}") from error


def folded(model: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[nn.Module, Report]:
    """The plain model, and a report of how far it is from ``model`` in float64.

    Raises CheckpointError without inputs, MismatchError when it is further away than float64 rounds.
    """
    if inputs is None and not kwargs:
        raise CheckpointError("a folded model is proved by running it: give inputs (--input)")
    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
    given = tree_map(_double, (args, kwargs))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        error = _distance(_run(exact, given), _run(fold(exact), given))
    if not error <= _LIMIT:
        raise MismatchError(
            f"the folded model differs from the original by {error:.3g} of its largest output in float64"
        )
    found = {"max_error": error, "limit": _LIMIT, "problem": "", "passed": True}
    device = next((str(p.device) for p in model.parameters()), "none")
    note = "folded into a plain PyTorch model, which needs no normswap; compared in float64, by the largest output"
    return fold(model), Report((), device, "float64", "eval", "none, it is plain PyTorch", found, (note,))


def replaced(found: Checkpoint, model: nn.Module) -> Checkpoint:
    """``found`` with the state_dict of ``model``."""
    state = OrderedDict(model.state_dict())
    return replace(found, state=state, others=(), prefixes=())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(model: nn.Module, given: tuple[Any, Any]) -> list[Tensor]:
    try:
        return [t for t in tree_leaves(model(*given[0], **given[1])) if isinstance(t, Tensor) and t.is_floating_point()]
    except Exception as error:  # the model's own code may raise anything on these inputs
        raise CheckpointError(f"{type(model).__name__} could not be run in float64: {one_line(error)}") from error


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    if [t.shape for t in one] != [t.shape for t in other] or not one:
        return float("inf")
    largest = max((float(t.abs().max()) for t in one if t.numel()), default=0.0) or 1.0
    return (
        max((float((a - b).abs().max()) for a, b in zip(one, other, strict=True) if a.numel()), default=0.0) / largest
    )
