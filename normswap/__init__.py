"""Swap the normalisation layers of a PyTorch model for fast CUDA kernels, and prove that nothing else changed."""

from __future__ import annotations

from normswap import modules, native
from normswap.checkpoint import load_model
from normswap.modules import copy_weights
from normswap.optimize import optimize, plan, report, revert, validate
from normswap.plan import MismatchError, NormswapError, NothingSwappedError, Plan, PlanError
from normswap.report import Report

__version__ = native.version()

__all__ = [
    "MismatchError",
    "NormswapError",
    "NothingSwappedError",
    "Plan",
    "PlanError",
    "Report",
    "copy_weights",
    "load_model",
    "modules",
    "optimize",
    "plan",
    "report",
    "revert",
    "validate",
]
