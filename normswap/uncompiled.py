"""Blocks in which what torch.compile has wrapped runs as it was written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models and children as they were written: a proof is of the code, and its own must not be traced."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled; loading it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
