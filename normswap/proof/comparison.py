"""What is found by comparing ours with PyTorch's and the float64 reference: how far off both are, and what is wrong."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normswap.criterion import Magnitudes, error_share, excused, limit_of, mask_mismatch, own_rounding

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


def worst_of(found: Iterable[Comparison]) -> Comparison:
    """All of them as one."""
    return functools.reduce(Comparison.worst, found)


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
    """One random cotangent for every run of a comparison, whatever the dtype of its output; the same every time.
    ``which``: of another output, another one, so that each gradient is known by what it is made of."""

    def __init__(self, which: int = 0) -> None:
        self.which = which
        self.drawn: Tensor | None = None

    def __call__(self, output: Tensor) -> Tensor:
        if self.drawn is None:
            generator = torch.Generator(output.device).manual_seed(_SEED + self.which)
            self.drawn = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return self.drawn.to(output.dtype)


_AT_ONCE = 2**22
"""Elements of the largest tensor that is judged in one go."""


def verdict(
    what: str,
    ours: Tensor,
    eager: Tensor,
    reference: Tensor,
    magnitude: Tensor,
    c: float,
    extra: Tensor | float = 0.0,
) -> Comparison:
    """Judge ``ours``, called ``what``; the others are those of ``criterion.error_share``, ``eager`` is PyTorch's."""
    if ours.dtype == eager.dtype and 0 < ours.numel() <= _AT_ONCE:
        share, theirs = _shares(ours, eager, reference, magnitude, c, extra)
        if share <= 1.0 and theirs < math.inf:  # neither has a NaN or Inf: nothing else can be wrong
            return Comparison(share, theirs, note=_told(what, theirs))
    share, theirs = (error_share(tensor, reference, magnitude, c, extra) for tensor in (ours, eager))
    if share > 1.0:  # an element that is PyTorch's own, bit for bit, is not held against ours
        changed = ~((ours == eager) | (ours.isnan() & eager.isnan()))
        parts = (reference, magnitude, torch.as_tensor(extra).to(reference))
        of, size, added = (part.expand(ours.shape)[changed] for part in parts)
        share = error_share(ours[changed], of, size, c, added)
    note, problem = _told(what, theirs), ""
    if wrong := int(excused(eager, reference).sum()):
        note = f"{what}: PyTorch's is not finite in {wrong} elements that float64 has finite"
    elif eager.numel() and not eager.isfinite().any():
        note = f"{what}: PyTorch's is nowhere finite on these inputs, so that nothing was compared"
    if differs := mask_mismatch(ours, eager, reference):
        problem = f"{what}: {differs}"
    elif share > 1.0:
        problem = f"{what}: error is {share:.3g} times its limit"
    return Comparison(share, theirs, problem=problem, note=note)


def _told(what: str, theirs: float) -> str:
    return f"{what}: PyTorch's own error is {theirs:.3g} times the limit" if theirs > 1.0 else ""


def _shares(
    ours: Tensor, eager: Tensor, reference: Tensor, magnitude: Tensor, c: float, extra: Tensor | float
) -> list[float]:
    """Both shares, in one wait for the device; not a number or infinite where one of the tensors is."""
    limit = limit_of(reference, ours.dtype, magnitude, c, extra)
    reference = reference.expand(ours.shape)
    worst = [torch.linalg.vector_norm((tensor - reference).div_(limit), math.inf) for tensor in (ours, eager)]
    found: list[float] = torch.stack(worst).tolist()
    return found


class Checks:
    """What is ``found`` of the tensors of one comparison, with the first problem and the first note. ``c`` and
    ``c_gradient``: what an error may be, in units of 2^-24 times the magnitude."""

    def __init__(self, c: float, c_gradient: float) -> None:
        self.c, self.c_gradient = c, c_gradient
        self.found = Comparison()

    def add(
        self,
        what: str,
        ours: Tensor,
        eager: Tensor,
        reference: Tensor,
        magnitude: Tensor,
        extra: Tensor | float = 0.0,
        c: float | None = None,
    ) -> None:
        """Judge one tensor."""
        one = verdict(what, ours, eager, reference, magnitude, self.c if c is None else c, extra)
        self.found = self.found.worst(one)

    def fail(self, problem: str) -> None:
        """Keep what is wrong, where nothing was before."""
        self.found = self.found.worst(Comparison(problem=problem))

    def are_alike(self, ours: Sequence[Tensor], eager: Sequence[Tensor]) -> bool:
        """Whether the outputs have the same dtypes and shapes."""
        mine, theirs = ([_form(tensor) for tensor in outputs] for outputs in (ours, eager))
        if mine != theirs:
            self.fail(f"outputs are {', '.join(mine)}, PyTorch's {', '.join(theirs)}")
        return mine == theirs

    def reach_the_same(self, ours: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> bool:
        """Whether the gradients are of the same tensors."""
        if missing := sorted(ours.keys() ^ eager.keys()):
            self.fail(f"gradients reach other tensors than PyTorch's: {', '.join(missing)}")
        return not missing

    def add_buffers(
        self,
        ours: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        size: Magnitudes,
        kernel_ran: bool,
        prefix: str = "",
    ) -> None:
        """Judge the buffers after the call; in ``size`` they go by their names without the ``prefix``."""
        for name, buffer in eager.items():
            if not buffer.is_floating_point():
                if not torch.equal(ours[name], buffer):
                    self.fail(f"buffer {name} differs from PyTorch's")
                continue
            known = name.removeprefix(prefix)
            magnitude = size.buffers.get(known, expected[name].abs())
            moved = size.coarse_buffers.get(known, torch.zeros_like(magnitude))
            extra = own_rounding(buffer.dtype, kernel_ran) * magnitude + self.c * size.coarse_unit * moved
            self.add(f"buffer {name}", ours[name], buffer, expected[name], magnitude, extra)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
