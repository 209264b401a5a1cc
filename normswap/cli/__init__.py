"""The ``normswap`` command."""

from normswap.cli.commands import main

__all__ = ["main"]
