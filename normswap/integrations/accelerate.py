"""accelerate: ``prepare`` with the norms of the model swapped first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from normswap.integrations.together import optimize_together, refuse_dispatched
from normswap.plans import NormswapError


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    *others: Any,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """``accelerator.prepare(model, *others)`` of ``model`` with its norms swapped, in place, on the accelerator's
    device. ``example_inputs``, ``example_kwargs`` and ``options`` are those of ``normswap.optimize``.

    Raises NormswapError for a model that accelerate has dispatched or prepared already.
    """
    refuse_dispatched(model, "call this before dispatch_model, or after remove_hook_from_submodules")
    if any(model is known for known in accelerator._models):
        raise NormswapError("the model is prepared already; call this instead of accelerator.prepare")
    if accelerator.device_placement and accelerator.distributed_type != DistributedType.FSDP:
        model.to(accelerator.device)
    with accelerator.autocast():
        optimize_together(model, example_inputs, example_kwargs, options)
    return accelerator.prepare(model, *others)
