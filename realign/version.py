"""Name and version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "realign-rl"
UNKNOWN = "0+unknown"
"""Version of source files that are imported without being installed."""


def installed_version() -> str:
    """Return the version of this package as pip shows it, or `UNKNOWN` if it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return UNKNOWN
