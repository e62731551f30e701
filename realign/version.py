"""Versions of installed distributions, and the name of that of realign."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTION = "realign-rl"
UNKNOWN = "0+unknown"
"""Version of source files that are imported without being installed."""


@cache
def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed.

    Asked once per process: each answer parses a file with the whole description of the distribution.
    """
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None


def installed_version() -> str:
    """Return the version of this package as pip shows it, or `UNKNOWN` if it is not installed."""
    return version_of(_DISTRIBUTION) or UNKNOWN
