"""Swap the normalisation layers of a PyTorch model for fast CUDA kernels, and prove that nothing else changed."""

from __future__ import annotations

from importlib import metadata as _metadata

from normswap import modules
from normswap.checkpoint import CheckpointError, load_model
from normswap.fold import fold
from normswap.modules import copy_weights
from normswap.optimize import apply, disabled, optimize, plan, report, revert, validate
from normswap.plan import MismatchError, NormswapError, NothingSwappedError, Plan, PlanError
from normswap.report import Report
from normswap.rules.registered import register_norm

try:
    __version__ = _metadata.version("normswap")
except _metadata.PackageNotFoundError:  # run from its sources
    __version__ = "0+unknown"

__all__ = [
    "CheckpointError",
    "MismatchError",
    "NormswapError",
    "NothingSwappedError",
    "Plan",
    "PlanError",
    "Report",
    "apply",
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
    "validate",
]
