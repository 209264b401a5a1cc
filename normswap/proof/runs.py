"""What a region is run as, and what comes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap import modules
from normswap.criterion import small_parts
from normswap.ops.at_once import AtOnce
from normswap.ops.dispatch import PLAIN
from normswap.plans import REGION, Match
from normswap.proof.pieces import Piece
from normswap.regions.helper import Fused
from normswap.regions.rewrite import Compiled


def swapped_op(compiled: Compiled, original: type[nn.Module], match: Match) -> Fused | Swapped:
    """What computes a region of a module of the class ``original`` once it is swapped for ``match``."""
    if match.kind == REGION:
        return Fused(compiled)
    return Swapped(modules.swapped_class(match.kind, original, match.attributes))


class Swapped:
    """A whole module in the class ``cls`` that is installed for it, as the op of a region."""

    expression, at_once = None, AtOnce(None)  # the module asks that itself

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls

    def __call__(self, children: Mapping[str, Any], packed: Any) -> Any:
        (module,) = children.values()
        object.__setattr__(module, "__class__", self.cls)
        return module(packed)

    def dtype(self, children: Mapping[str, Any], x: Tensor) -> None:
        """Nothing is known of who reads the result."""


@dataclass(frozen=True)
class Run:
    """One execution of a copy of a region: the module that it ran in, its outputs, gradients by name, and whether a
    kernel of ours ran."""

    holder: nn.Module
    outputs: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    by_kernel: bool = False

    def part(self, piece: Piece) -> Run:
        """What of the outputs belongs to a piece of the input."""
        return replace(self, outputs=[piece.cut(output) for output in self.outputs])

    def gives_what(self, other: Run) -> bool:
        """Whether its outputs are those of the ``other``, bit for bit, and none has a NaN."""
        return _are_alike(dict(enumerate(self.outputs)), dict(enumerate(other.outputs)))

    def does_what(self, other: Run) -> bool:
        """The same of its outputs, gradients and buffers."""
        buffers = [dict(run.holder.named_buffers()) for run in (self, other)]
        return self.gives_what(other) and _are_alike(self.gradients, other.gradients) and _are_alike(*buffers)


def _are_alike(some: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> bool:
    forms = [{name: (t.dtype, t.device, t.shape) for name, t in tensors.items()} for tensors in (some, others)]
    return forms[0] == forms[1] and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(values: list[Any]) -> Tensor:
    """Those of the bits of dense tensors of numbers, on the device of the first; an exchange of elements they do not
    tell."""
    plain = [v.detach() for v in values if type(v) in PLAIN and v.is_floating_point() and not v.is_nested]
    dense = [v.resolve_neg() for v in plain if v.layout is torch.strided]
    sums = [part.sum() for v in dense for part in small_parts(v.view(_OF_SIZE[v.element_size()]))]
    return torch.stack([one.to(sums[0].device) for one in sums]) if sums else torch.zeros(0)
