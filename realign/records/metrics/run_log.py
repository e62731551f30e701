"""`RunLog`: the file realign.log of a run, with its settings, warnings, log records, metrics and end."""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from realign.errors import ConfigError, RealignError
from realign.own_files import open_regular

NAME = "realign.log"
PACKAGE = "realign"
MOST = 10_000
"""Maximum number of warnings between two calls of `take_warnings`; older ones are dropped."""
LATEST = 10
"""Messages in `RunLog.latest_warnings`."""


class RunLog(logging.Handler):
    """Log of a run. It collects lines in memory until its file is opened, since the folder is created after loading.

    A failed write, such as on a full disk, never affects the run.

    Attributes:
        warnings: number of warnings so far.
        latest_warnings: messages of the latest warnings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.warnings = 0
        self.latest_warnings: deque[str] = deque(maxlen=LATEST)
        self._waiting: list[str] = []
        self._warned: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._file: BinaryIO | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Log warnings, the records of realign's loggers, and an error that leaves this context."""
        logger, before = logging.getLogger(PACKAGE), warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            text = " ".join(str(message).split())
            self._warn(text)
            self.write(f"WARNING {text}")
            before(message, category, filename, lineno, file, line)

        logger.addHandler(self)
        warnings.showwarning = show
        try:
            yield
        except BaseException as error:
            self.write(_describe(error))
            raise
        finally:
            if warnings.showwarning is show:  # other code may have replaced it
                warnings.showwarning = before
            logger.removeHandler(self)
            self.close()

    def open(self, folder: Path, *, fresh: bool) -> None:
        """Open the file in a folder and write the collected lines. With `fresh`, replace an earlier file."""
        if self._file is None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if fresh else 0) | os.O_APPEND
                self._file = open_regular(folder / NAME, flags, "ab")
            except (OSError, ConfigError):  # ConfigError: the path is a link or a pipe
                return
            waiting, self._waiting = self._waiting, []
            for line in waiting:
                self._put(line)

    def write(self, text: str) -> None:
        """Write a text with the time of day."""
        line = f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text}\n"
        if self._file is None:
            self._waiting.append(line)
        else:
            self._put(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record."""
        if record.levelno >= logging.WARNING:
            self._warn(f"{record.name}: {record.getMessage()}")
        self.write(self.format(record))

    def take_warnings(self) -> list[dict[str, Any]]:
        """Return the warnings since the last call, each with its time; callable while other threads warn."""
        taken = []
        while self._warned:
            taken.append(self._warned.popleft())
        return taken

    def _warn(self, text: str) -> None:
        self.warnings += 1
        self.latest_warnings.append(text)
        self._warned.append({"time": round(time.time(), 3), "message": text})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step in one line."""
        self.write(f"step {step}  " + "  ".join(f"{name} {value:.5g}" for name, value in metrics.items()))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                self._waiting.clear()
        super().close()

    def _put(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(line.encode(errors="backslashreplace"))
        except (OSError, ValueError):  # a full disk, or a thread that logs while the file is closed
            return


def _describe(error: BaseException) -> str:
    if isinstance(error, RealignError | OSError | KeyboardInterrupt):
        return f"ENDED BY {type(error).__name__}: {' '.join(str(error).split())}"
    return "ENDED BY " + "".join(traceback.format_exception(error)).rstrip()


__all__ = ["NAME", "RunLog"]
