"""Ctrl-C and SIGTERM while a run trains: the first lets the step end, a second one ends the run at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal; the message says how far it came.

    Attributes:
        exit_code: 128 + the number of the signal: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopSignals:
    """Inside this context the first signal is noted, and the second one raises `Interrupted`; a third one kills.

    Signals can be handled in the main thread only; in another one nothing changes.

    Args:
        quiet: say nothing, as one of several processes that a signal stops together.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.received: int | None = None
        """The number of the first signal."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            raise Interrupted(number, "interrupted; the steps after the last checkpoint are lost")
        self.received = number
        if not self._quiet:
            # print could be called while it is in the middle of another print
            os.write(2, b"\nstopping after this step; once more to end at once\n")
