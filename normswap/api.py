"""The public calls of the package."""

from __future__ import annotations

from normswap import modules
from normswap.checkpoint import CheckpointError, convert, load_model, save
from normswap.folding import fold
from normswap.modules import copy_weights
from normswap.pipeline import apply, disabled, optimize, plan, report, revert, validate
from normswap.plans import MismatchError, NormswapError, NothingSwappedError, Plan, PlanError
from normswap.reports import Report
from normswap.rules.registered import register_norm

__all__ = [
    "CheckpointError",
    "MismatchError",
    "NormswapError",
    "NothingSwappedError",
    "Plan",
    "PlanError",
    "Report",
    "apply",
    "convert",
    "copy_weights",
    "disabled",
    "fold",
    "load_model",
    "modules",
    "optimize",
    "plan",
    "register_norm",
    "report",
    "revert",
    "save",
    "validate",
]
