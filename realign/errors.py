"""Errors that a user can cause and fix, as one small hierarchy, and the exit codes of the command line.

`RealignError`s are raised at the boundaries (config, data, files, servers). The command line prints them as one line.
Every other exception is a bug, of the project or of a user's own component, and keeps its traceback. Pure functions
(`realign.functional`, `realign.api`) raise `ValueError` and `TypeError`.
"""

from __future__ import annotations

from enum import IntEnum


class RealignError(Exception):
    """Base class of the errors that are reported in one line."""


class ConfigError(RealignError):
    """A wrong setting, or settings that do not fit together."""


class SettingsError(ConfigError, ValueError):
    """A field of a settings object outside its range or choices; `realign.config` prefixes the key."""


class DataError(RealignError):
    """A dataset, a row, a tokenizer or a model folder that cannot be used as it is."""


class CheckpointError(RealignError):
    """A checkpoint that cannot be resumed from."""


class RewardError(RealignError):
    """Rewards or environments that failed for more responses than the settings allow."""


class RunError(RealignError):
    """A run that cannot continue, such as too many non-finite steps in a row."""


class TransientError(RealignError):
    """A failure that a restart with `resume=auto` can fix: a full disk, an unreachable server, a lost worker."""


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    success = 0
    """Done; also: no step is left to do."""
    bug = 1
    """An unexpected exception; the traceback was printed."""
    error = 2
    """An error that no restart fixes."""
    transient = 75
    """A failure that restarting with `resume=auto` fixes (`EX_TEMPFAIL`)."""
    interrupted = 130
    """Stopped by SIGINT."""
    terminated = 143
    """Stopped by SIGTERM."""


__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExitCode",
    "RealignError",
    "RewardError",
    "RunError",
    "SettingsError",
    "TransientError",
]
