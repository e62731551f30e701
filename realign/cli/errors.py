"""Error messages and exit codes of the command line."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from realign.config.errors import one_line
from realign.config.explain import explain
from realign.errors import RealignError
from realign.mistakes import raised_on_purpose

BUG, USER_ERROR, INTERRUPTED = 1, 2, 130


def guarded(action: Callable[[], int | None], debug: bool) -> int:
    """Run `action`, and report a user error in one line on stderr. Bugs propagate.

    Returns:
        The exit code.
    """
    try:
        return action() or 0
    except BrokenPipeError:
        # The reader of stdout closed the pipe. Without this, Python would report the error again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR
    except (Exception, KeyboardInterrupt) as error:
        text, code = described(error, debug)
        if code == BUG:
            raise
        sys.stderr.write(f"{text}\n")
        return code


@contextmanager
def plain_warnings(debug: bool) -> Iterator[None]:
    """Print each `UserWarning` once, in one line. With `debug`, keep Python's format with the source line."""
    before, told = warnings.formatwarning, set[str]()

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category is not UserWarning:
            return before(message, category, filename, lineno, line)
        text = f"warning: {one_line(message)}\n"
        again = text in told
        told.add(text)
        return "" if again else text

    if not debug:
        warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def described(error: BaseException, debug: bool) -> tuple[str, int]:
    """Return the text to print for an error, and the exit code. For bugs or with `debug`, returns the traceback."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted", getattr(error, "exit_code", INTERRUPTED)
    message = user_message(error) if isinstance(error, Exception) and not debug else None
    if message is None:
        return "".join(traceback.format_exception(error)).rstrip(), BUG
    return f"error: {message}", USER_ERROR


def user_message(error: Exception) -> str | None:
    """Return one line for an error that realign or Hydra raised on purpose, or for an `OSError`; None for bugs."""
    if isinstance(error, RealignError):
        return one_line(error)
    if isinstance(error, OSError):
        return one_line(error)
    kinds = (ValueError, RuntimeError, ArithmeticError, ImportError)
    if isinstance(error, kinds) and raised_on_purpose(error):
        return one_line(error)
    home = type(error).__module__.split(".")[0]
    if raised_on_purpose(error, "submitit") and home == "builtins":
        return one_line(error)  # for example, Slurm is not installed
    if home == "submitit":  # a failed job of a sweep: the message ends with the last line of the job
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{lines[0]}: {lines[-1]}"
    if home in ("hydra", "omegaconf", "yaml"):
        return explain(error)
    return None
