"""The norms that people write out as expressions: one file each, which holds all there is to know about it. Nothing
else lists them."""

from __future__ import annotations

import importlib
import pkgutil

from normswap.kinds.kind import Kind

_FILES = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))

KINDS: dict[str, Kind] = {file.KIND.name: file.KIND for file in _FILES if hasattr(file, "KIND")}
"""By name."""
