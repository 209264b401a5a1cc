"""Lightning: a callback that swaps the norms of a LightningModule before it is fitted or run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import normswap
from normswap.integrations.together import optimize_together


class NormSwap(Callback):  # type: ignore[misc]
    """Swap the norms in place, on the Trainer's device, before optimizers are made and the strategy wraps the module.

    ``example_inputs``, ``example_kwargs`` and ``options`` are those of ``normswap.optimize``; without inputs the
    module's ``example_input_array`` is taken. Keys stay as they are: checkpoints load without this callback.
    """

    def __init__(
        self,
        example_inputs: Tensor | tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.inputs, self.kwargs, self.options = example_inputs, example_kwargs, options

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """What Lightning calls before each stage; swapped is in the first."""
        if normswap.report(pl_module).swapped:
            return
        trainer.strategy.model_to_device()
        inputs, kwargs = self.inputs, self.kwargs
        if inputs is None and kwargs is None:
            example = pl_module.example_input_array
            inputs, kwargs = (None, example) if isinstance(example, Mapping) else (example, None)
        with trainer.precision_plugin.forward_context():
            optimize_together(pl_module, inputs, kwargs, self.options)
