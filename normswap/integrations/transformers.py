"""transformers: a callback for its Trainer, and models saved with the plan of what is swapped in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

import normswap
from normswap.integrations.together import optimize_together, refuse_dispatched
from normswap.plans import NormswapError, Plan

PLAN = "normswap_plan.json"
"""The file beside a model's config that holds its plan."""


class NormSwap(TrainerCallback):  # type: ignore[misc]
    """Swap the norms in place as the Trainer is made, before its optimizer and before it wraps the model.

    ``example_inputs``, ``example_kwargs`` and ``options`` are those of ``normswap.optimize``; without inputs the
    model's ``dummy_inputs`` are taken.
    """

    def __init__(
        self,
        example_inputs: Tensor | tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.inputs, self.kwargs, self.options = example_inputs, example_kwargs, options
        self.done = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What the Trainer calls as the last thing when it is made."""
        model, given = kwargs["model"], self.kwargs
        refuse_dispatched(model, "optimize it before it is dispatched")
        if self.inputs is None and given is None:
            given = getattr(model, "dummy_inputs", None)
        optimize_together(model, self.inputs, given, self.options)
        self.done = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises NormswapError where the Trainer was made before it knew of this callback."""
        if not self.done:
            raise NormswapError("give NormSwap to the Trainer as it is made: Trainer(..., callbacks=[NormSwap()])")


def save_pretrained(model: Any, folder: str | Path, **kwargs: Any) -> None:
    """``model.save_pretrained(folder)``, and the plan of what is swapped in ``model`` beside it."""
    model.save_pretrained(folder, **kwargs)
    (Path(folder) / PLAN).write_text(normswap.report(model).plan.to_json())


def from_pretrained(factory: Any, name: str | Path, *args: Any, plan: Plan | None = None, **kwargs: Any) -> nn.Module:
    """``factory.from_pretrained(name, ...)`` swapped as ``plan`` says, by default the plan that ``save_pretrained``
    wrote into the folder ``name``; nothing is run or proved.

    Raises NormswapError when there is no plan, or accelerate dispatched the model as it was loaded, and PlanError when
    the plan is of another model.
    """
    file = Path(name) / PLAN
    if plan is None and not file.is_file():
        raise NormswapError(f"there is no {PLAN} in {name}: pass plan=, or save the model by save_pretrained of here")
    model: nn.Module = factory.from_pretrained(name, *args, **kwargs)
    refuse_dispatched(model, "load it without device_map and dispatch what this returns")
    return normswap.apply(model, plan or Plan.from_json(file.read_text()), inplace=True)
