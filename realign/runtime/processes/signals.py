"""Handle Ctrl-C and SIGTERM: the first signal stops the run after the current step, the second stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal. The message describes its progress.

    Attributes:
        exit_code: 128 + signal number: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.exit_code = 128 + number

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return [str(self)]


class StopSignals:
    """Signal handlers for a context: the first signal is recorded, the second raises `Interrupted`, the third kills.

    Python handles signals in the main thread only. In other threads this class has no effect.

    Args:
        quiet: Print no message. Use this for all ranks but one in distributed training.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.received: int | None = None
        """Number of the first signal; None before it arrives."""
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
            # the third signal then kills the process, even if closing the run hangs
            for handled in SIGNALS:
                signal.signal(handled, signal.SIG_DFL)
            raise Interrupted(number, "interrupted; the steps after the last checkpoint are lost")
        self.received = number
        if not self._quiet:
            # print is not reentrant, and the signal may interrupt another print
            os.write(2, b"\nstopping after this step; once more to end at once\n")
