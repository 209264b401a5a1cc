"""The kinds of norms, one file each: those of torch.nn, and those that people write out as expressions. Nothing else
lists them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

import torch
from torch import Tensor, nn

from normswap.criterion import Magnitudes
from normswap.kinds.kind import Kind
from normswap.kinds.norm import Norm
from normswap.plans import Match, PlanError

_FILES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

KINDS: dict[str, Kind] = {file.KIND.name: file.KIND for file in _FILES if hasattr(file, "KIND")}
"""Those written out, by name."""
NORMS: dict[str, Norm] = {file.NORM.name: file.NORM for file in _FILES if hasattr(file, "NORM")}
"""Those of torch.nn, by name."""


def kind_of(match: Match) -> Norm | Kind:
    """What is known of a module that is one as a whole. Raises PlanError for a name that no kind has."""
    if match.by_hand:
        return KINDS["rms_norm_by_hand"]
    found = NORMS.get(match.kind) or KINDS.get(match.kind)
    if found is None:
        raise PlanError(f"plan: kind {match.kind!r} is not one of {', '.join((*NORMS, *KINDS))}")
    return found


def magnitudes(match: Match, site: nn.Module, x: Tensor, dtype: torch.dtype) -> Magnitudes:
    """The magnitudes of ``site``, a float64 copy of the original in its own class as it was before the call, on the
    float64 input ``x``. ``dtype`` is the one that the original rounds to on the way."""
    kind = kind_of(match)
    if isinstance(kind, Kind):
        return kind.magnitudes_at(match, site, x, dtype)
    found = kind.magnitudes(match.view(site), x)
    return replace(found, gradients=lambda dy: match.renamed(found.gradients(dy)))


def sample(match: Match, module: nn.Module) -> tuple[int, ...]:
    """A shape to try ``module`` on."""
    kind = kind_of(match)
    if isinstance(kind, Kind):
        return kind.sample(*kind.values_at(match, module))
    return kind.sample(match.view(module))
