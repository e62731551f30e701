"""realign: reinforcement learning for language models on packed sequences, with one file per algorithm."""

from realign.version import installed_version

__version__ = installed_version()
__all__ = ["__version__"]
