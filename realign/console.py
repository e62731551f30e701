"""The console of a process: what it can't show or write is dropped, and never ends the work that it reports.

A terminal is closed, `tee` dies, the disk of a log is full, a locale knows ASCII only: the files of a run have
everything that it prints, so the run goes on.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class LastingStream:
    """A text stream whose errors are kept instead of raised. What its encoding lacks is escaped.

    Attributes:
        lost: first error of the stream, after which some output is missing; None if everything was written.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or as much of it as possible."""
        with self._keeping():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one by one."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._keeping():
            self._stream.flush()

    def settle(self) -> None:
        """Write what is buffered for the last time. Python would try again at its exit, and report the error then."""
        self.flush()
        if self.lost is not None:
            with suppress(OSError, ValueError):  # ValueError: the stream has no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or error
        except ValueError:
            if not self._stream.closed:
                raise
            self.lost = self.lost or OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def lasting_console(console: Console | None = None) -> Iterator[LastingStream]:
    """Keep errors of stdout, stderr and the file of `console` from what happens in this context.

    Yields:
        The stream of stdout.
    """
    before = sys.stdout, sys.stderr
    own = None if console is None or console.file in before else console.file
    out, err = map(_make_lasting, before)
    sys.stdout, sys.stderr = out, err
    if console is not None and own is not None:
        console.file = LastingStream(own)  # type: ignore[assignment]
    try:
        yield out
    finally:
        for stream, earlier in ((out, before[0]), (err, before[1])):
            if stream is not earlier:
                stream.settle()
        sys.stdout, sys.stderr = before
        if console is not None and own is not None:
            console.file = own


def _make_lasting(stream: IO[str] | LastingStream | None) -> LastingStream:
    if isinstance(stream, LastingStream):
        return stream
    # without an open descriptor, the next file that is opened would be stdout, and get what is printed
    return LastingStream(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def write_stderr(text: str) -> None:
    """Write to stderr at once, as a signal handler and a thread beside a run that hangs must; ignores its errors."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
