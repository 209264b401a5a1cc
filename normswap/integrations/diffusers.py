"""diffusers: every component of a pipeline swapped, on what one run of the pipeline gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import normswap
from normswap.integrations.together import refuse_dispatched
from normswap.reports import Report
from normswap.untouched import set_in

_METHODS = ("forward", "decode", "encode")
"""How a pipeline calls its components: an autoencoder by the others, not by its forward."""


def optimize_pipeline(
    pipeline: Any, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Report]:
    """Run ``pipeline(*args, **kwargs)`` once, swap the norms of every component in place on what it was called with
    first, and return the report of each. ``options`` are those of ``normswap.optimize``.

    A component that the run does not call is proved on made-up inputs. Raises NormswapError where the pipeline is
    offloaded by hooks of accelerate, and what ``optimize`` raises; every component is then as it was.
    """
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    for part in parts.values():
        refuse_dispatched(part, "call this before enable_model_cpu_offload and its like")
    with _first_calls(parts) as calls:
        pipeline(*args, **kwargs)
    before = {name for name, part in parts.items() if normswap.report(part).swapped}
    chosen = {"validate": "forward", "on_empty": "ignore", **(options or {})}
    try:
        for name, part in parts.items():
            method, inputs, named = calls.get(name, ("forward", None, None))
            with _called_by(part, method), torch.no_grad():
                normswap.optimize(part, inputs, named, inplace=True, **chosen)
    except BaseException:
        for name in parts.keys() - before:
            normswap.revert(parts[name])
        raise
    return {name: normswap.report(part) for name, part in parts.items()}


@contextlib.contextmanager
def _first_calls(parts: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[str, Any, Any]]]:
    """By which method, and with what, each of ``parts`` is called first in the block."""
    calls: dict[str, tuple[str, Any, Any]] = {}

    def recording(name: str, method: str, known: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name not in calls:
                calls[name] = (method, *tree_map_only(Tensor, Tensor.clone, (args, kwargs)))
            return known(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            for method in _METHODS:
                if callable(known := getattr(part, method, None)):
                    stack.enter_context(set_in(part.__dict__, {method: recording(name, method, known)}))
        yield calls


def _called_by(part: nn.Module, method: str) -> contextlib.AbstractContextManager[object]:
    """A block in which calling ``part`` calls its ``method``."""
    named = {} if method == "forward" else {"forward": getattr(part, method)}
    return set_in(part.__dict__, named)
