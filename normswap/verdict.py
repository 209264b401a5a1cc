"""One tensor of ours, and PyTorch's own, against the float64 reference: how far off both are, and what is wrong."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from normswap.criterion import FLOAT32_ROUNDING, error_share, excused, half_ulp, mask_mismatch

_AT_ONCE = 2**22
"""Elements of the largest tensor that is judged in one go."""


class Verdict(NamedTuple):
    """The worst errors as shares of their limit, ours and PyTorch's; what is wrong with ours, "" if nothing is, and
    what else is worth a word."""

    share: float
    eager_share: float
    problem: str = ""
    note: str = ""


def verdict(
    what: str,
    ours: Tensor,
    eager: Tensor,
    reference: Tensor,
    magnitude: Tensor,
    c: float,
    extra: Tensor | float = 0.0,
) -> Verdict:
    """Judge ``ours``, called ``what``; the others are those of ``criterion.error_share``, ``eager`` is PyTorch's."""
    if ours.dtype == eager.dtype and 0 < ours.numel() <= _AT_ONCE:
        share, theirs = _shares(ours, eager, reference, magnitude, c, extra)
        if share <= 1.0 and theirs < math.inf:  # neither has a NaN or Inf: nothing else can be wrong
            return Verdict(share, theirs, note=_told(what, theirs))
    share, theirs = (error_share(tensor, reference, magnitude, c, extra) for tensor in (ours, eager))
    if share > 1.0:  # an element that is PyTorch's own, bit for bit, is not held against ours
        changed = ~((ours == eager) | (ours.isnan() & eager.isnan()))
        parts = (reference, magnitude, torch.as_tensor(extra).to(reference))
        of, size, added = (part.expand(ours.shape)[changed] for part in parts)
        share = error_share(ours[changed], of, size, c, added)
    note = problem = ""
    if wrong := int(excused(eager, reference).sum()):
        note = f"{what}: PyTorch's is not finite in {wrong} elements that float64 has finite"
    else:
        note = _told(what, theirs)
    if differs := mask_mismatch(ours, eager, reference):
        problem = f"{what}: {differs}"
    elif share > 1.0:
        problem = f"{what}: error is {share:.3g} times its limit"
    return Verdict(share, theirs, problem, note)


def _told(what: str, theirs: float) -> str:
    return f"{what}: PyTorch's own error is {theirs:.3g} times the limit" if theirs > 1.0 else ""


def _shares(
    ours: Tensor, eager: Tensor, reference: Tensor, magnitude: Tensor, c: float, extra: Tensor | float
) -> list[float]:
    """Both shares, in one wait for the device; not a number or infinite where one of the tensors is."""
    limit = half_ulp(reference, ours.dtype) + c * FLOAT32_ROUNDING * magnitude + extra
    worst = [((tensor.double() - reference).abs() / limit).amax() for tensor in (ours, eager)]
    found: list[float] = torch.stack(worst).tolist()
    return found
