"""The norms of torch.nn and those that people write out as expressions: one file each. Nothing else lists them."""

from __future__ import annotations

import importlib
import pkgutil

from normswap.kinds.kind import Kind
from normswap.kinds.norm import Norm

_FILES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

KINDS: dict[str, Kind] = {file.KIND.name: file.KIND for file in _FILES if hasattr(file, "KIND")}
"""Those written out, by name."""
NORMS: dict[str, Norm] = {file.NORM.name: file.NORM for file in _FILES if hasattr(file, "NORM")}
"""Those of torch.nn, by name."""
