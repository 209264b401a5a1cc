"""``python -m normswap.cli``."""

from normswap.cli.commands import main

if __name__ == "__main__":
    main()
