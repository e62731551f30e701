"""Errors that a user can cause and fix, and the exit codes of the command line.

The modules at the boundaries (config, data, files, servers) raise `RealignError`s, which the command line prints in
one line. Every other exception is a bug in the project or in a user's component, and keeps its traceback.
`realign.functional` and `realign.api` raise `ValueError` and `TypeError`; their `SettingsError` and `GraphError` are
both.
"""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any

from realign.text import for_terminal


class RealignError(Exception):
    """Base class of the errors that the command line and notebooks report in one line.

    Its text can repeat files and settings of other people, so `str` escapes control characters and has a limit.

    Attributes:
        run: `realign.Run` that `realign.train` began before the error; None if it began none.
    """

    run: Any = None

    def __str__(self) -> str:
        return for_terminal(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [f"error: {self}"]


class ConfigError(RealignError):
    """An invalid setting, or settings that are incompatible."""


class SettingsError(ConfigError, ValueError):
    """A field of a settings object outside its range or choices; `realign.config` prefixes the key."""


class NoEffectError(SettingsError):
    """A setting that changes nothing beside the values of the others.

    Attributes:
        owner: Class of the settings.
        key: Name of the field; `realign.config` makes it the full key.
        value: Value of the field as it is written on the command line, empty for a component.
        reason: Why the field has no effect, and a cure.
    """

    def __init__(self, owner: type, key: str, value: str, reason: str) -> None:
        super().__init__(f"{key}{value and '='}{value}: has no effect {reason}")
        self.owner, self.key, self.value, self.reason = owner, key, value, reason


class GraphError(ConfigError, ValueError):
    """A dataflow graph whose calls do not fit together."""


class DataError(RealignError):
    """An invalid dataset, row, tokenizer or model folder."""


class CheckpointError(RealignError):
    """A checkpoint that cannot be resumed from."""


class RunComplete(CheckpointError):
    """The checkpoint to resume from is that of the last step, so no step is left to do."""


class RewardError(RealignError):
    """Reward or environment failures for more responses than the settings allow."""


class RunError(RealignError):
    """A run that cannot continue, such as too many non-finite steps in a row."""


class TransientError(RealignError):
    """A failure that a restart with `resume=auto` can fix: a full disk, an unreachable server, a lost worker."""


_TRANSIENT_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        # disk: full, over quota, failing, or a network file system that is away
        *("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EREMOTEIO", "ENOTCONN", "ENOLCK"),
        # operating system: out of a shared resource for now
        *("EAGAIN", "EBUSY", "EINTR", "ENOMEM", "EMFILE", "ENFILE"),
        # network: server or route away
        *("ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
    )
    if hasattr(errno, name)
)
"""Codes of operating system errors that can disappear without a change of the configuration."""


def is_transient(error: OSError) -> bool:
    """Return whether a restart can fix an operating system error: a full disk, for example, but no missing file.

    An error without a code, such as `OSError("model was not saved")`, is classified by the error that caused it.
    """
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if error.errno is None and isinstance(error.__cause__, OSError):
        return is_transient(error.__cause__)
    return error.errno in _TRANSIENT_ERRNOS


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    success = 0
    """The run finished, or had no steps left to do."""
    bug = 1
    """An unexpected exception. The command line prints its traceback."""
    error = 2
    """An error that a restart does not fix."""
    transient = 75
    """A failure that restarting with `resume=auto` fixes (`EX_TEMPFAIL`)."""
    interrupted = 130
    """Stopped by SIGINT."""
    terminated = 143
    """Stopped by SIGTERM. Other signals have their own code, 128 and their number: 129 for SIGHUP, 138 for SIGUSR1."""
