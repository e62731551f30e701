"""`python -m realign`: the command line, also started by torchrun."""

from __future__ import annotations

import sys

from realign.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
