"""The `realign` command line. This package imports neither torch nor Hydra."""

from realign.cli.commands import main

__all__ = ["main"]
