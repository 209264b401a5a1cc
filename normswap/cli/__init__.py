"""The ``normswap`` command."""

from __future__ import annotations

from normswap.cli.commands import main

__all__ = ["main"]
