"""What the adapters share: models that are run by several processes, or by hooks of accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import normswap
from normswap.plans import NormswapError, Plan


def refuse_dispatched(model: nn.Module, cure: str) -> None:
    """Raise NormswapError, with the ``cure``, where accelerate has put a hook around a forward in ``model``: what is
    swapped under it would not run."""
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise NormswapError(f"accelerate has put a hook around the forward of {hooked or 'the model'}; {cure}")


def optimize_together(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, options: Any) -> None:
    """``normswap.optimize`` in place. Where several processes train one model, the first proves and chooses, and the
    others replay its plan, so that all of them run the same code.

    The inputs are moved to where the model's parameters are. Raises what ``optimize`` does, and NormswapError in the
    other processes when it failed in the first.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    told: list[str | None] = [None]
    try:
        if not several or dist.get_rank() == 0:
            inputs, kwargs = _moved((inputs, kwargs), model)
            normswap.optimize(model, inputs, kwargs, inplace=True, **options)
            told = [normswap.report(model).plan.to_json()]
    finally:
        if several:
            dist.broadcast_object_list(told)
    if several and dist.get_rank() != 0:
        if told[0] is None:
            raise NormswapError("the first process could not optimize the model; its error says why")
        normswap.apply(model, Plan.from_json(told[0]), inplace=True)


def _moved(given: Any, model: nn.Module) -> Any:
    where = next((parameter.device for parameter in model.parameters()), None)
    return given if where is None else tree_map_only(Tensor, lambda tensor: tensor.to(where), given)
