"""``python -m normswap.cli``."""

from __future__ import annotations

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.getcwd():  # Python puts it first, before every library
    del sys.path[0]

from normswap.cli.commands import main

if __name__ == "__main__":
    main()
