"""What is found by comparing ours with PyTorch's, and what watches over a comparison."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Not a seed a person would choose: inputs drawn with the same one would equal the cotangent, and their gradient cancel.
_SEED = 0x6E6F726D


@dataclass(frozen=True)
class Comparison:
    """``share`` and ``eager`` are the worst error, ours and PyTorch's own, as a share of its limit; ``kernel_ran``
    whether an op of ours did; ``coverage`` the share of the samples compared; ``finite`` whether PyTorch's output has
    a number in it; ``problem`` why they do not match, "" if they do; ``note`` what else is worth a word."""

    share: float = 0.0
    eager: float = 0.0
    kernel_ran: bool = True
    gradients: bool = False
    coverage: float = 1.0
    dtype: str = ""
    device: str = ""
    finite: bool = True
    problem: str = ""
    note: str = ""
    declined: bool = False  # what was swapped left it to the original's own code

    def worst(self, other: Comparison) -> Comparison:
        """Both as one: the worse of each."""
        return replace(
            other,
            share=max(self.share, other.share),
            eager=max(self.eager, other.eager),
            kernel_ran=self.kernel_ran and other.kernel_ran,
            gradients=self.gradients or other.gradients,
            coverage=min(self.coverage, other.coverage),
            finite=self.finite or other.finite,
            problem=self.problem or other.problem,
            declined=self.declined and other.declined,
            note=self.note or other.note,
        )


class Seen:
    """What was compared so far, by all but the values: of what is like it two slices of a large input are enough.
    ``told`` is called at each."""

    def __init__(self, told: Callable[[], object] = lambda: None) -> None:
        self._known: set[Hashable] = set()
        self._told = told

    def before(self, x: Tensor, *of: Hashable) -> bool:
        """Whether it was asked before of what ``of`` says and a tensor of the form of ``x``."""
        self._told()
        key = (*of, x.shape, x.stride(), x.dtype, x.device)
        known = key in self._known
        self._known.add(key)
        return known


class KernelWitness(TorchDispatchMode):
    """Sees whether an op of ours ran."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        declined = all(o is None for o in (out if isinstance(out, tuple | list) else (out,)))
        declined = declined and func.__name__.endswith(("_or_none.default", "_recorded.default"))
        self.ran = self.ran or (func.namespace == "normswap" and not declined)
        return out


class Cotangent:
    """One random cotangent for every run of a comparison, whatever the dtype of its output; the same every time."""

    def __init__(self) -> None:
        self.drawn: Tensor | None = None

    def __call__(self, output: Tensor) -> Tensor:
        if self.drawn is None:
            generator = torch.Generator(output.device).manual_seed(_SEED)
            self.drawn = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return self.drawn.to(output.dtype)
