"""The regions of one module as uses of a candidate."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normswap.installed import original_class
from normswap.plans import Match
from normswap.regions.helper import make_helper
from normswap.regions.holder import holder_of
from normswap.regions.listening import Listener
from normswap.regions.rewrite import Compiled, Helper
from normswap.timing.candidate import Code, Recorder, Use


class RegionRecorder(Listener):
    """What reaches the regions of ``owner``, of the class ``original``, in a run of its statements."""

    def __init__(self, owner: nn.Module, original: type[nn.Module], match: Match) -> None:
        super().__init__(owner, original, match)
        self.recorders = {id(one): Recorder() for one in self.compiled}
        self.forms: dict[int, TreeSpec] = {}

    def heard(self, compiled: Compiled, owner: Any, packed: Any) -> None:
        """Records."""
        leaves, self.forms[id(compiled)] = tree_flatten(packed)
        self.recorders[id(compiled)].add(*leaves)

    def uses(self, gradients: bool, looks: Any) -> list[tuple[str, tuple[Use, ...]]]:
        """For every region the child that is its norm, or "", and every form of call. ``looks(module)`` tells modules
        apart whose calls may take other time."""
        return [
            (one.region.norm if one.region.type else "", self._uses(one, gradients, looks)) for one in self.compiled
        ]

    def _uses(self, one: Compiled, gradients: bool, looks: Any) -> tuple[Use, ...]:
        if id(one) not in self.forms:
            return ()
        # Where a region stands in its forward does not matter to its time.
        steps = tuple((step.does, step.operand) for step in one.region.steps)
        key = ("region", one.region.kind, steps, one.region.shared, str(one.region.activation))
        codes = partial(self._codes, one, self.forms[id(one)])
        return self.recorders[id(one)].uses((key, looks(holder_of(one.region, self.owner))), codes, gradients)

    def _codes(self, compiled: Compiled, form: TreeSpec) -> tuple[Code, Code]:
        helper = make_helper(compiled)
        return self._code(compiled, form, compiled.snippet), self._code(compiled, form, helper)

    def _code(self, compiled: Compiled, form: TreeSpec, function: Helper) -> Code:
        holder = holder_of(compiled.region, self.owner)
        for child in holder._modules.values():
            object.__setattr__(child, "__class__", original_class(child))
        return Code(lambda *leaves: function(holder, tree_unflatten(list(leaves), form)), [*holder.parameters()])
