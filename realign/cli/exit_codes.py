"""Error messages and exit codes of the command line.

The class of an exception decides: a `RealignError`, an `OSError` and an error of Hydra are printed in one line, and
every other exception keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from realign.config.errors import explain, one_line
from realign.errors import ExitCode, RealignError, RunComplete, TransientError, is_transient


def full_errors() -> bool:
    """Return whether the environment asks for the traceback of every error."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def run_guarded(action: Callable[[], int | None], debug: bool) -> int:
    """Run `action`, and report a user error in one line on stderr. Bugs propagate.

    Returns:
        The exit code.
    """
    try:
        return action() or ExitCode.success
    except (Exception, KeyboardInterrupt) as error:
        text, code = describe(error, debug)
        if code == ExitCode.bug:
            raise
        sys.stderr.write(f"{text}\n")
        return code


@contextmanager
def plain_warnings(debug: bool) -> Iterator[None]:
    """Print each `UserWarning` once, in one line. With `debug`, keep Python's format with the source line."""
    before, printed = warnings.formatwarning, set[str]()

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning:
            return before(message, category, filename, lineno, line)
        text = f"warning: {one_line(message)}\n"
        again = text in printed
        printed.add(text)
        return "" if again else text

    if not debug:
        warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def describe(error: BaseException, debug: bool) -> tuple[str, int]:
    """Return the text to print for an error, and the exit code. For bugs or with `debug`, the text is the traceback."""
    code = exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        text = str(error) or "interrupted"
        return f"error: {text}" if code == ExitCode.transient else text, code
    message = user_message(error) if isinstance(error, Exception) and not debug else None
    if message is None:
        return "".join(traceback.format_exception(error)).rstrip(), code
    return message if isinstance(error, RunComplete) else f"error: {message}", code


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an error ends, as listed in `ExitCode`."""
    if isinstance(error, KeyboardInterrupt):
        return int(getattr(error, "exit_code", ExitCode.interrupted))
    if isinstance(error, RunComplete):
        return ExitCode.success
    if isinstance(error, TransientError) or (isinstance(error, OSError) and is_transient(error)):
        return ExitCode.transient
    if isinstance(error, Exception) and user_message(error) is not None:
        return ExitCode.error
    return ExitCode.bug


def user_message(error: Exception) -> str | None:
    """Return one line for a `RealignError`, an `OSError`, or an error of Hydra or its launcher; None for bugs."""
    if isinstance(error, RealignError | OSError):
        return one_line(error)
    home = type(error).__module__.split(".")[0]
    if home == "submitit":  # a failed job of a sweep: the message ends with the last line of the job
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return ": ".join(dict.fromkeys([lines[0], lines[-1]]))
    if home in ("hydra", "omegaconf", "yaml"):
        return explain(error)
    return None
