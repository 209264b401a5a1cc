"""``python -m normswap.cli``."""

from __future__ import annotations

from normswap.cli.commands import main

if __name__ == "__main__":
    main()
