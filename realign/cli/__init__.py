"""The command line: `realign`. Imports neither torch nor Hydra."""

from realign.cli.commands import main

__all__ = ["main"]
