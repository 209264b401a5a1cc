"""Swap the normalisation layers of a PyTorch model for fast CUDA kernels, and prove that nothing else changed."""

from __future__ import annotations

import importlib
import os
import sys

_first = os.path.basename(sys.argv[0] if sys.argv else "")
_is_module = _first == "-m" and "normswap.cli" in sys.orig_argv
if _is_module and os.path.realpath(sys.path[0]) == os.getcwd():  # Python puts it there, before every library
    del sys.path[0]

from importlib import metadata as _metadata  # noqa: E402

try:
    __version__ = _metadata.version("normswap")
except _metadata.PackageNotFoundError:  # run from its sources
    __version__ = "0+unknown"


def complete() -> None:
    """Make the public calls there, where they are not: the command begins without PyTorch, which takes seconds."""
    api = importlib.import_module("normswap.api")
    globals().update({name: getattr(api, name) for name in api.__all__})


if _first != "normswap" and not _is_module:
    from normswap.api import *  # noqa: F403
    from normswap.api import __all__ as __all__
