"""`python -m realign`: the command line; what torchrun starts, too."""

from __future__ import annotations

import sys

from realign.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
